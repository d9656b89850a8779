"""The panels of the report as plain plotly figures: dictionaries, nothing is drawn here."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from adaptive_platform.report import curves, timeline
from adaptive_platform.report.run_data import RunData, labels
from adaptive_platform.report.series import (
    axes_of,
    buckets,
    colour,
    column,
    time_parts,
    time_shares,
)
from adaptive_platform.report.traces import (
    Shown,
    column_line,
    layout,
    log_axis,
    smoothed,
    trace,
)

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
    each = 1 if _most_workers(runs) < 8 else None
    drawn = [
        _panel(
            shown, "loss", "Loss", "Training loss, smoothed, and held-out loss.", "loss",
            curves.loss,
        ),
        _panel(
            shown, "accuracy", "Accuracy", "Share of samples that were right, training smoothed.",
            "accuracy", curves.accuracy, tickformat=".0%",
        ),
        _panel(
            shown, "batch", "Global batch",
            "Samples per optimizer step, without left-over ends of epochs; markers are decisions.",
            "samples per step", curves.batch, rangemode="tozero",
        ),
        _panel(
            shown, "noise", "Gradient noise scale",
            "Batch at which noise equals signal; dashed: the batch in use.",
            "samples, log scale", curves.noise,
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
            "workers", timeline.workers, rangemode="tozero", dtick=each,
        ),
        _panel(
            shown, "members", "Who took part when",
            "One line per worker's place, as long as it was taken; marks where that changed.",
            "place", timeline.members, rangemode="tozero", dtick=each,
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
