"""Table, checked claims and curves of `bench recipes`, from the lines of its runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from adaptive_platform.bench.recipe_multiples import Curve, write_multiples
from adaptive_platform.report.plots import Line, Plot, write_plots

__all__ = ["CLAIMS", "Claim", "by_arm", "cell", "column", "render", "verdict", "write_pages"]

TARGET = 0.95
"""Held-out accuracy whose first reaching is a column of its own."""

Lines = Sequence[Mapping[str, Any]]

# Two-sided 95 % quantiles of Student's t, by degrees of freedom.
_T95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One thing that should show: a figure of one arm is larger than that of another."""

    text: str
    larger: str
    """Arm whose figure should be the larger one."""
    smaller: str
    figure: str = "accuracy"


CLAIMS = (
    Claim(
        text="A large batch with the linear rule loses accuracy",
        larger="small batch",
        smaller="goyal-2017",
    ),
    Claim(text="AdaScale wins some of it back", larger="johnson-2020", smaller="goyal-2017"),
    Claim(text="LARS wins some of it back", larger="jia-2018", smaller="goyal-2017"),
    Claim(
        text="The collapsed ensemble beats its last snapshot",
        larger="codreanu-2017",
        smaller="codreanu-2017, last",
    ),
    Claim(
        text="GSNR-reduced gradients (VRGD) improve LARS",
        larger="jiang-2023",
        smaller="jiang-2023, LARS alone",
    ),
    Claim(
        text="ABSA takes fewer steps than the small batch",
        larger="small batch",
        smaller="yao-2018",
        figure="steps",
    ),
    Claim(
        text="ABSA keeps more accuracy than the large batch with the linear rule",
        larger="yao-2018",
        smaller="goyal-2017",
    ),
    Claim(
        text="A batch in stages keeps more accuracy than the large batch with the linear rule",
        larger="mikami-2018",
        smaller="goyal-2017",
    ),
    Claim(
        text="The noise scale's batch takes fewer steps than the small batch",
        larger="small batch",
        smaller="mccandlish-2018",
        figure="steps",
    ),
    Claim(
        text="Post-local SGD beats the same large batch",
        larger="lin-2018",
        smaller="lin-2018, every step",
    ),
    Claim(
        text="Local steps send fewer bytes",
        larger="lin-2018, every step",
        smaller="lin-2018",
        figure="bytes_per_step",
    ),
    Claim(
        text="Sparse sums send fewer bytes",
        larger="sun-2019, dense",
        smaller="sun-2019",
        figure="bytes_per_step",
    ),
    Claim(
        text="Dense sums are more accurate than sparse ones (should not show)",
        larger="sun-2019, dense",
        smaller="sun-2019",
    ),
    Claim(
        text=f"SP-NGD is at {TARGET:.0%} in fewer steps than LARS",
        larger="jia-2018",
        smaller="osawa-2020",
        figure="steps_to_target",
    ),
)


def write_pages(lines: Lines, stem: Path, *, reference: str, panels: Collection[str]) -> None:
    """Write `<stem>.md`, `<stem>.html` and, where matplotlib is installed, `<stem>.png`.

    Args:
        lines: One mapping per run, as `bench recipes` records them, arms in the table's order.
        stem: Path without suffix.
        reference: Arm that is drawn dashed.
        panels: Arms that the picture shows; the page shows all.
    """
    arms = by_arm(lines)
    Path(f"{stem}.md").write_text(render(lines, stem.name), encoding="utf-8")
    curves = {arm: _mean_curve([line["curve"] for line in mine]) for arm, mine in arms.items()}
    write_plots(_plots(curves, reference), f"{stem}.html", "Published systems, small forms")
    if find_spec("matplotlib"):
        shown = {arm: curves[arm] for arm in curves if arm == reference or arm in panels}
        write_multiples(shown, Path(f"{stem}.png"), reference=reference)


def render(lines: Lines, stem: str) -> str:
    """The page: how it was made, the table, the claims."""
    arms = by_arm(lines)
    head = [
        "arm", "accuracy in %", "steps", f"steps to {TARGET:.0%}", "samples", "seconds",
        "KiB sent per step", "waiting for sums in %", "seeds",
    ]  # fmt: skip
    rows = [head, ["---"] * len(head)]
    for arm, mine in arms.items():
        rows.append([
            arm,
            cell(column(mine, "accuracy"), ".1f", 100.0),
            cell(column(mine, "steps"), ".0f"),
            cell(column(mine, "steps_to_target"), ".0f"),
            cell(column(mine, "samples"), ".0f"),
            cell(column(mine, "seconds"), ".1f"),
            cell(column(mine, "bytes_per_step"), ".1f", 1 / 1024),
            cell(column(mine, "exposed_share"), ".1f", 100.0),
            str(len(mine)),
        ])  # fmt: skip
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    verdicts = "\n".join(
        f"- {claim.text}: {found}"
        for claim in CLAIMS
        if (found := verdict(claim, arms)) is not None
    )
    picture = ""
    if find_spec("matplotlib"):
        picture = f"\n![Held-out accuracy over optimizer steps and samples]({stem}.png)\n"
    return (
        "# Published systems, side by side\n\n"
        "Small forms of the shipped recipes: every arm trains on the same number of samples. Two "
        "workers, each a process of one thread. Mean over seeds with its 95 % interval (Student's "
        f"t); a dash where not every seed reached {TARGET:.0%}. Steps to it are known to one "
        "evaluation. Bytes are those of the first worker, by the plan, without evaluations. "
        "Waiting is the part of the steps' seconds between the end of backward and the end of "
        "the sums of gradients; averages of weights (local SGD, elastic averaging, gossip) are not "
        f"in it. Torch {torch.__version__} on a CPU that others may have used, so seconds and "
        "waiting are a hint only.\n\n"
        f"    adaptive-platform bench recipes --out DIR\n\n{table}\n{picture}\n"
        "## What should show, and whether it does\n\n"
        "Differences are taken seed by seed; *shows* means that their 95 % interval lies on the "
        f"claimed side of zero.\n\n{verdicts or '- No pair of arms was run.'}\n"
    )


def verdict(claim: Claim, arms: Mapping[str, Lines]) -> str | None:
    """Whether a claim shows, with the mean difference and its interval; None without both arms."""
    larger, smaller = arms.get(claim.larger), arms.get(claim.smaller)
    if larger is None or smaller is None:
        return None
    other = {line["seed"]: line for line in smaller}
    pairs = [(line, other[line["seed"]]) for line in larger if line["seed"] in other]
    figures = [(_figure(a, claim.figure), _figure(b, claim.figure)) for a, b in pairs]
    known = [a - b for a, b in figures if a is not None and b is not None]
    unit = {"accuracy": " points", "bytes_per_step": " B"}.get(claim.figure, " steps")
    scale = 100.0 if claim.figure == "accuracy" else 1.0
    if len(known) < len(figures) or not known:
        return f"can't be said, {len(known)} of {len(figures)} seeds have the figure on both sides."
    mean = scale * statistics.mean(known)
    if len(known) == 1:
        return f"one seed says {mean:+.1f}{unit}."
    half = scale * _half_width(known)
    side = "shows" if mean - half > 0 else "does not show"
    if mean + half < 0:
        side = "the opposite shows"
    return f"**{side}**, {mean:+.1f} ± {half:.1f}{unit}."


def _plots(curves: Mapping[str, Curve], reference: str) -> list[Plot]:
    def drawn(at: int) -> list[Line]:
        return [
            Line(
                name=arm,
                x=[point[at] for point in points],
                y=[100.0 * point[2] for point in points],
                dashed=arm == reference,
            )
            for arm, points in curves.items()
        ]

    accuracy = "held-out accuracy in %, mean over seeds"
    return [
        Plot(title="Steps", x="optimizer steps", y=accuracy, lines=drawn(0), log_x=True),
        Plot(title="Samples", x="samples", y=accuracy, lines=drawn(1)),
    ]


def _mean_curve(curves: Sequence[Sequence[Sequence[float]]]) -> list[list[float]]:
    """Point by point, as far as all curves go."""
    return [
        [statistics.mean(values) for values in zip(*points, strict=True)]
        for points in zip(*curves, strict=False)
    ]


def by_arm(lines: Lines) -> dict[str, Lines]:
    """The runs of each arm, arms in the order of their first run."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        found.setdefault(line["arm"], []).append(line)
    return dict(found)


def _figure(line: Mapping[str, Any], name: str) -> float | None:
    if name != "steps_to_target":
        return float(line[name])
    return next((float(step) for step, _, found in line["curve"] if found >= TARGET), None)


def column(lines: Lines, name: str) -> list[float | None]:
    """A figure of each run; None where a run does not have it."""
    return [_figure(line, name) for line in lines]


def cell(values: Sequence[float | None], form: str, scale: float = 1.0) -> str:
    """Mean and 95 % interval; how many have a value where not all do."""
    found = [scale * value for value in values if value is not None]
    if len(found) < len(values) or not found:
        return f"- ({len(found)} of {len(values)})"
    mean = format(statistics.mean(found), form)
    if len(found) == 1 or len(set(found)) == 1:
        return mean
    return f"{mean} ± {format(_half_width(found), form)}"


def _half_width(values: Sequence[float]) -> float:
    quantile = _T95.get(len(values) - 1, 1.96)
    return quantile * statistics.stdev(values) / math.sqrt(len(values))
