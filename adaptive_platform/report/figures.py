"""The panels of the report as plain plotly figures: dictionaries, nothing is drawn here."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from adaptive_platform.report.run_data import RunData, labels
from adaptive_platform.report.series import (
    axes_of,
    buckets,
    colour,
    column,
    extremes,
    full_steps,
    smooth,
    staircase,
    time_parts,
    time_shares,
)
from adaptive_platform.report.traces import (
    Shown,
    column_line,
    held_out,
    layout,
    log_axis,
    smoothed,
    smoothing,
    stroke,
    trace,
    wrapped,
)
from adaptive_platform.report.wording import count

__all__ = ["Panel", "panels"]

POINTS = 2000
"""Most points of a trace where one run is shown; several runs share them."""
_OPTIONAL = ("accuracy", "gsnr", "members")
_PART_COLOURS = {
    "compute": "#2f6db3",
    "data": "#d1a22b",
    "reduce": "#c0486f",
    "statistics": "#3b8f5a",
}
_EVENT_SYMBOLS = {
    "joined": "triangle-up",
    "left": "triangle-down",
    "lost": "x",
    "regrouped": "diamond-open",
    "resize": "diamond",
    "checkpoint": "circle-open",
    "resume": "triangle-right",
    "stop": "square",
    "broken_sample": "x-thin-open",
    "warning": "triangle-up",
    "skipped": "x",
}


@dataclass(frozen=True, slots=True)
class Panel:
    """One figure with the words around it."""

    name: str
    """Short name, used as id on the page."""
    title: str
    note: str
    """One sentence that says how to read it."""
    figure: dict[str, Any]
    """`data` and `layout` for plotly."""

    @property
    def empty(self) -> bool:
        """True where no trace holds a number."""
        return not any(
            value is not None
            for trace in self.figure["data"]
            for value in trace["x" if trace["type"] == "bar" else "y"]
        )


def panels(runs: Sequence[RunData]) -> list[Panel]:
    """All panels, for one run or several over each other, in reading order.

    Panels of what only some recipes measure are left out where nothing was recorded.
    """
    shown = [
        Shown(run, html.escape(label), colour(at), max(100, POINTS // len(runs)), len(runs) == 1)
        for at, (run, label) in enumerate(zip(runs, labels(list(runs)), strict=True))
    ]
    drawn = [
        _panel(shown, "loss", "Loss", "Training loss, smoothed, and held-out loss.", "loss", _loss),
        _panel(
            shown, "accuracy", "Accuracy", "Share of samples that were right, training smoothed.",
            "accuracy", _accuracy, tickformat=".0%",
        ),
        _panel(
            shown, "batch", "Global batch",
            "Samples per optimizer step, without left-over ends of epochs; markers are decisions.",
            "samples per step", _batch, rangemode="tozero",
        ),
        _panel(
            shown, "noise", "Gradient noise scale",
            "Batch at which noise equals signal; dashed: the batch in use.",
            "samples, log scale", _noise,
            **log_axis([column(run.steps, "noise_scale") for run in runs]),
        ),
        _panel(
            shown, "lr", "Learning rate",
            "After schedule and learning-rate rule, without left-over ends of epochs.",
            "learning rate", lambda run: column_line(run, "lr"), rangemode="tozero",
        ),
        _panel(
            shown, "gain", "AdaScale gain", "Base-batch steps that one step is worth.",
            "gain", lambda run: column_line(run, "gain"),
        ),
        _panel(
            shown, "efficiency", "Statistical efficiency",
            "Progress per sample, against the base batch.",
            "efficiency", lambda run: column_line(run, "efficiency"), tickformat=".0%",
        ),
        _panel(
            shown, "gsnr", "Gradient signal-to-noise ratio",
            "Of a single example; median over layers, one per parameter tensor.",
            "GSNR, log scale", lambda run: column_line(run, "gsnr"),
            **log_axis([column(run.steps, "gsnr") for run in runs]),
        ),
        _panel(
            shown, "throughput", "Throughput", "All workers together.",
            "samples per second", lambda run: smoothed(run, "samples_per_second"),
            rangemode="tozero",
        ),
        _time_split(shown),
        _panel(
            shown, "workers", "Workers and events", "Workers that took part, and what happened.",
            "workers", _workers, rangemode="tozero", dtick=1 if _most_workers(runs) < 8 else None,
        ),
        _panel(
            shown, "members", "Who took part when",
            "One line per worker's place, as long as it was taken; marks where that changed.",
            "place", _members, rangemode="tozero", dtick=1 if _most_workers(runs) < 8 else None,
        ),
    ]  # fmt: skip
    return [panel for panel in drawn if panel.name not in _OPTIONAL or not panel.empty]


def _panel(
    shown: Sequence[Shown],
    name: str,
    title: str,
    note: str,
    unit: str,
    draw: Callable[[Shown], list[dict[str, Any]]],
    **yaxis: Any,
) -> Panel:
    traces = [trace for run in shown for trace in draw(run)]
    return Panel(name, title, note, {"data": traces, "layout": layout(unit, **yaxis)})


def _loss(shown: Shown) -> list[dict[str, Any]]:
    curves = smoothed(shown, "loss", "training", show=True) + held_out(shown, "loss")
    return curves + _decisions_on(shown, "loss")


def _decisions_on(shown: Shown, name: str) -> list[dict[str, Any]]:
    """Changes of the batch as marks on a smoothed curve, so that its bends can be told apart."""
    steps, changes = shown.run.steps, _changes(shown)
    values = column(steps, name)
    if not shown.alone or not len(changes) or np.isnan(values).all():
        return []
    averaged = smooth(values, smoothing(values))
    known = np.isfinite(averaged)
    height = np.interp(column(changes, "step"), column(steps, "step")[known], averaged[known])
    return [
        trace(
            shown, axes_of(shown.run, changes), height, np.arange(len(changes)), "batch changed",
            mode="markers", text=_told_changes(changes), hovertemplate="%{text}<extra></extra>",
            marker={"size": 8, "color": "white", "line": {"color": shown.colour, "width": 2}},
        )
    ]  # fmt: skip


def _changes(shown: Shown) -> Any:
    """The newest decisions that changed the batch."""
    decisions = shown.run.decisions
    old, new = column(decisions, "old_batch"), column(decisions, "new_batch")
    return decisions.iloc[np.flatnonzero((old != new) & np.isfinite(new))[-shown.points :]]


def _told_changes(changes: Any) -> list[str]:
    return [
        f"<b>{count(row.old_batch)} → {count(row.new_batch)}</b> at step {count(row.step)}"
        f"<br>{wrapped(row.reason)}"
        for row in changes.itertuples()
    ]


def _accuracy(shown: Shown) -> list[dict[str, Any]]:
    return smoothed(shown, "accuracy", "training", show=True) + held_out(shown, "accuracy")


def _batch(shown: Shown) -> list[dict[str, Any]]:
    steps = full_steps(shown.run.steps)
    values = column(steps, "global_batch")
    traces = [
        trace(
            shown, axes_of(shown.run, steps), values, staircase(values, shown.points), "",
            line=stroke(shown, shape="vh"), showlegend=not shown.alone,
        )
    ]  # fmt: skip
    changes = _changes(shown)
    if len(changes):
        traces.append(
            trace(
                shown, axes_of(shown.run, changes), column(changes, "new_batch"),
                np.arange(len(changes)), "decisions", mode="markers",
                text=_told_changes(changes), hovertemplate="%{text}<extra></extra>",
                marker={"size": 9, "color": "white", "line": {"color": shown.colour, "width": 2}},
                showlegend=shown.alone,
            )
        )  # fmt: skip
    return traces


def _noise(shown: Shown) -> list[dict[str, Any]]:
    steps = shown.run.steps
    values = column(steps, "noise_scale")
    values = np.where(values > 0, values, np.nan)
    if np.isnan(values).all():
        return []
    positions = axes_of(shown.run, steps)
    traces = [
        trace(
            shown, positions, values, extremes(values, shown.points), "noise scale",
            line=stroke(shown),
        )
    ]  # fmt: skip
    full = full_steps(steps)
    batch = column(full, "global_batch")
    traces.append(
        trace(
            shown, axes_of(shown.run, full), batch, staircase(batch, shown.points), "batch in use",
            line={"color": shown.colour if not shown.alone else "#777777", "width": 1.5,
                  "dash": "dash", "shape": "vh"},
            showlegend=shown.alone,
        )
    )  # fmt: skip
    return traces


def _workers(shown: Shown) -> list[dict[str, Any]]:
    steps, events = shown.run.steps, shown.run.events
    values = column(steps, "world_size")
    traces = [
        trace(
            shown, axes_of(shown.run, steps), values, staircase(values, shown.points), "",
            line=stroke(shown, shape="vh"), showlegend=not shown.alone,
        )
    ]  # fmt: skip
    if not len(steps):
        return []
    skipped = steps[column(steps, "skipped") == 1.0].tail(500)
    marks = [("skipped", skipped, ["The step was skipped on all workers."] * len(skipped))]
    for kind in dict.fromkeys(events["kind"]) if "kind" in events else []:
        rows = events[events["kind"] == kind].tail(500)
        marks.append((str(kind), rows, list(rows["text"])))
    for kind, rows, texts in marks:
        if not len(rows):
            continue
        height = np.interp(column(rows, "step"), column(steps, "step"), values)
        told = html.escape(kind.replace("_", " "))
        traces.append(
            trace(
                shown, axes_of(shown.run, rows), height, np.arange(len(rows)), told,
                mode="markers", text=[f"<b>{told}</b><br>{wrapped(text)}" for text in texts],
                hovertemplate="%{text}<extra></extra>", showlegend=shown.alone,
                marker={"size": 9, "symbol": _EVENT_SYMBOLS.get(kind, "star"),
                        "color": shown.colour, "line": {"width": 1.5}},
            )
        )  # fmt: skip
    return traces


def _members(shown: Shown) -> list[dict[str, Any]]:
    """One line per place among the workers, broken where nobody had it; for one run alone."""
    steps, events = shown.run.steps, shown.run.events
    world = column(steps, "world_size")
    sizes = np.unique(world[np.isfinite(world)])
    if not shown.alone or len(sizes) < 2:
        return []
    edges = np.flatnonzero(np.diff(world))
    both = np.array([0, *edges, *(edges + 1), len(world) - 1])
    chosen = np.unique(both)[-shown.points :]
    positions = axes_of(shown.run, steps)
    traces = [
        trace(
            shown, positions, np.where(world >= place, float(place), np.nan), chosen,
            f"place {place}", line=stroke(shown, 8.0), showlegend=False, opacity=0.55,
        )
        for place in range(1, int(sizes[-1]) + 1)
    ]  # fmt: skip
    for kind in ("joined", "left", "lost", "resize", "resume"):
        rows = events[events["kind"] == kind].tail(500) if "kind" in events else events[:0]
        if len(rows):
            height = np.interp(column(rows, "step"), column(steps, "step"), world)
            traces.append(
                trace(
                    shown, axes_of(shown.run, rows), height, np.arange(len(rows)), kind,
                    mode="markers", text=[wrapped(text) for text in rows["text"]],
                    hovertemplate="%{text}<extra></extra>",
                    marker={"size": 11, "symbol": _EVENT_SYMBOLS[kind], "color": "#222222"},
                )
            )  # fmt: skip
    return traces


def _time_split(shown: Sequence[Shown]) -> Panel:
    """Shares of the step time: over the run where it is alone, else one bar per run."""
    title, note = "Where the time goes", "Shares of the step time."
    if len(shown) == 1:
        traces = _time_areas(shown[0])
        look = layout("share of step time", tickformat=".0%", range=[0, 1])
        return Panel("time", title, note, {"data": traces, "layout": look})
    totals = {run.label: time_shares(run.run.steps) for run in shown}
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": part,
            "y": list(totals),
            "x": [shares.get(part) for shares in totals.values()],
            "marker": {"color": shade},
            "hovertemplate": f"{part}: %{{x:.1%}}<extra></extra>",
        }
        for part, shade in _PART_COLOURS.items()
    ]
    # Runs may have names that are numbers, such as trials.
    look = layout("", autorange="reversed", type="category")
    look["xaxis"] |= {"tickformat": ".0%", "range": [0, 1]}
    look["barmode"] = "stack"
    return Panel("time", title, note, {"data": traces, "layout": look})


def _time_areas(shown: Shown) -> list[dict[str, Any]]:
    parts = time_parts(shown.run.steps)
    last, sums = buckets(list(parts.values()), 200)
    total = np.sum(sums, axis=0) if sums else np.zeros(0)
    positions = axes_of(shown.run, shown.run.steps)
    traces = []
    for name, spent in zip(parts, sums, strict=True):
        share = np.divide(spent, total, out=np.full(len(spent), np.nan), where=total > 0)
        at = {unit: values[last] for unit, values in positions.items()}
        traces.append(
            trace(
                shown, at, share, np.arange(len(share)), name,
                stackgroup="time", line={"width": 0}, fillcolor=_PART_COLOURS[name],
                hovertemplate="%{y:.1%}",
            )
        )  # fmt: skip
    return traces


def _most_workers(runs: Sequence[RunData]) -> float:
    sizes = [column(run.steps, "world_size") for run in runs if len(run.steps)]
    return max((float(np.nanmax(size)) for size in sizes if not np.isnan(size).all()), default=1.0)
