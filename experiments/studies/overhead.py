"""What the loop and its statistics cost, with intervals: `adaptive-platform bench overhead`, kept.

    python experiments/studies/overhead.py --case resnet18
    python experiments/studies/overhead.py --case resnet50 --seconds 100

Each call measures one case and adds it as a line to `overhead.jsonl`; calls for the same case add
up, so a case can be measured in pieces on a machine that is quiet now and then. `overhead.md` is
written anew from all lines. fairscale and AdaptDL appear where they are installed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
from pathlib import Path

import torch

from adaptive_platform.bench.overhead import CASES, Measurement, all_cases, measure, sides_of
from adaptive_platform.bench.rows import median_interval

FEWEST = 6
"""Blocks below which no interval of the median holds with 95 %."""
HERE = Path(__file__).parent
ROUNDED = {"s/step": 3, "CPU s/step": 3, "MiB": 0}
TITLES = {"s/step": "time per step", "CPU s/step": "CPU time per step", "MiB": "peak memory"}


def read(path: Path) -> list[Measurement]:
    """All lines of the file, those of a case joined in the order in which they were measured.

    Rounds in which an arm was not there count as not a number for it.
    """
    found: dict[tuple[str, str], Measurement] = {}
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for line in map(json.loads, lines):
        key = line["case"], line["unit"]
        before = found.get(key)
        old, new = before.values if before else {}, line["values"]
        nothing = [[math.nan] * max(map(len, each.values()), default=0) for each in (old, new)]
        values = {
            arm: [*old.get(arm, nothing[0]), *new.get(arm, nothing[1])] for arm in {**old, **new}
        }
        found[key] = Measurement(
            case=line["case"],
            unit=line["unit"],
            values=values,
            notes=line["notes"],
        )
    return sorted(found.values(), key=lambda m: list(all_cases()).index(m.case))


def table(measurement: Measurement) -> str:
    digits = ROUNDED[measurement.unit]
    rows = [["", f"ours, {measurement.unit}", "baseline", "ratio", "95 % interval", "blocks"]]
    rows.append(["---"] * len(rows[0]))
    for words, (ours, baseline) in sides_of(measurement).items():
        pairs = [pair for pair in zip(ours, baseline, strict=True) if not math.isnan(sum(pair))]
        ours, baseline = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        ratios = [one / other for one, other in pairs]
        low, high = median_interval(ratios)
        rows.append([
            words,
            f"{statistics.median(ours):.{digits}f}",
            f"{statistics.median(baseline):.{digits}f}",
            f"{statistics.median(ratios):.3f}",
            f"{low:.3f} to {high:.3f}" if len(ratios) >= FEWEST else "too few blocks",
            str(len(ratios)),
        ])  # fmt: skip
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def page(found: list[Measurement]) -> str:
    cases = list(dict.fromkeys(measurement.case for measurement in found))
    parts = [
        "# What the loop and its statistics cost\n\n"
        "Two processes of one thread each take turns, step by step, between a bare PyTorch DDP "
        "loop, our loop without and with statistics, fairscale's AdaScale around DDP, and "
        "AdaptDL's estimator around DDP (without its data loader): 32 images of 32x32 each and "
        f"step, data in memory, Gloo on loopback, torch {torch.__version__.split('+')[0]}, "
        f"{os.cpu_count()} CPU cores. Ratio is the median of the ratios of blocks measured one "
        "after the other, with the interval of that median by order statistics, so "
        "whatever the distribution. "
        "A block is one step, or ten where only each tenth step does more. Memory is the peak "
        "resident size of a fresh process per loop. CPU time is what one process used, all threads "
        "together.\n\n"
        "Wall times stray with whatever else the machine does; CPU time hardly sees that. Where an "
        "interval holds 1, the difference is not told from chance.\n\n"
        "```bash\n"
        + "\n".join(f"python experiments/studies/overhead.py --case {case}" for case in cases)
        + "\n```\n\nThe same as a command, without keeping the single steps: "
        "`adaptive-platform bench overhead --case resnet18`.\n"
    ]
    for measurement in found:
        model, optimizer = CASES[measurement.case.removesuffix("-memory")]
        what = TITLES[measurement.unit]
        parts.append(f"\n## {model}, {optimizer}: {what}\n\n{table(measurement)}\n")
        parts += [f"\n{note}\n" for note in dict.fromkeys(measurement.notes)]
    return "".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=all_cases(), help="what to measure; nothing: only write")
    parser.add_argument("--seconds", type=float, default=120.0, help="of taking turns")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of lines and page")
    options = parser.parse_args()
    path = options.out / "overhead.jsonl"
    if options.case:
        with path.open("a", encoding="utf-8") as file:
            for new in measure(options.case, options.seconds):
                values = {arm: [round(v, 5) for v in found] for arm, found in new.values.items()}
                line = {"case": new.case, "unit": new.unit, "notes": new.notes, "values": values}
                file.write(json.dumps(line) + "\n")
    text = page(read(path))
    (options.out / "overhead.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
