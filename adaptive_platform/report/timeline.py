"""What the panels of the report draw of a run's workers: how many, who, and what happened."""

from __future__ import annotations

import html
from typing import Any

import numpy as np

from adaptive_platform.report.series import axes_of, column, staircase
from adaptive_platform.report.traces import Shown, beside, stroke, trace, wrapped

__all__ = ["members", "workers"]

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


def workers(shown: Shown) -> list[dict[str, Any]]:
    """How many worked together, with marks where something happened."""
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
                hovertemplate=beside(shown), showlegend=shown.alone,
                marker={"size": 9, "symbol": _EVENT_SYMBOLS.get(kind, "star"),
                        "color": shown.colour, "line": {"width": 1.5}},
            )
        )  # fmt: skip
    return traces


def members(shown: Shown) -> list[dict[str, Any]]:
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
                    hovertemplate=beside(shown),
                    marker={"size": 11, "symbol": _EVENT_SYMBOLS[kind], "color": "#222222"},
                )
            )  # fmt: skip
    return traces
