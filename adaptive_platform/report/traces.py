"""Lines and axes that the panels of the report are made of, as plain plotly dictionaries.

A trace has no `x` of its own: `meta.axes` holds its positions in each unit of `series.AXES`, and
the page draws one of them.
"""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from adaptive_platform.report.run_data import RunData
from adaptive_platform.report.series import (
    Numbers,
    axes_of,
    column,
    extremes,
    full_steps,
    json_numbers,
    smooth,
)
from adaptive_platform.report.wording import number

__all__ = [
    "Shown",
    "column_line",
    "held_out",
    "layout",
    "log_axis",
    "smoothed",
    "smoothing",
    "stroke",
    "trace",
    "wrapped",
]


@dataclass(frozen=True, slots=True)
class Shown:
    """A run with the way it is shown."""

    run: RunData
    label: str
    """Escaped for HTML, which is also how plotly reads text."""
    colour: str
    points: int
    alone: bool


def layout(unit: str, **yaxis: Any) -> dict[str, Any]:
    """The common look of all panels; `unit` names the vertical axis, `yaxis` adds to it."""
    if yaxis.get("tickformat") == ".0%":
        yaxis = {"hoverformat": ".1%", **yaxis}  # the pointer may tell more than the axis
    axis = {
        "gridcolor": "#ececec",
        "linecolor": "#bbbbbb",
        "zeroline": False,
        "ticks": "outside",
        "tickcolor": "#bbbbbb",
        "automargin": True,
    }
    return {
        "xaxis": {**axis, "title": {"text": ""}},
        "yaxis": {**axis, "title": {"text": unit, "standoff": 8}, **yaxis},
        "paper_bgcolor": "white",
        "plot_bgcolor": "white",
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": "#333333"},
        "margin": {"l": 56, "r": 12, "t": 8, "b": 44},
        "height": 300,
        "hovermode": "closest",
        "hoverlabel": {"bgcolor": "white", "bordercolor": "#cccccc", "align": "left"},
        "legend": {
            "orientation": "h",
            "y": 1.02,
            "yanchor": "bottom",
            "x": 0,
            "traceorder": "normal",
        },
        "modebar": {"orientation": "v", "bgcolor": "rgba(255,255,255,0)"},
        "showlegend": True,
    }


def trace(
    shown: Shown,
    positions: dict[str, Numbers],
    values: Numbers,
    chosen: Any,
    name: str,
    **style: Any,
) -> dict[str, Any]:
    """One trace.

    Args:
        shown: The run it belongs to; its label goes before `name` where several runs are shown.
        positions: Horizontal positions of all rows, in each unit of `AXES`.
        values: Vertical positions of all rows.
        chosen: Indices of the rows to draw.
        name: What it shows, for the legend; empty where that is the panel's title.
        style: More of plotly's scatter attributes.
    """
    axes = {unit: json_numbers(at[chosen], 7) for unit, at in positions.items()}
    full = name if shown.alone else f"{shown.label}: {name}" if name else shown.label
    return {
        "type": "scatter",
        "mode": "lines",
        "name": full or shown.label,
        "hovertemplate": f"<b>%{{y}}</b><br>%{{x}} %{{xaxis.title.text}}<extra>{full}</extra>",
        "y": json_numbers(values[chosen]),
        "meta": {"axes": axes},
        **style,
    }


def beside(shown: Shown) -> str:
    """What hovering a mark shows: the mark's text, and its run where there are several."""
    return f"%{{text}}<extra>{'' if shown.alone else shown.label}</extra>"


def stroke(shown: Shown, width: float = 2.0, **more: Any) -> dict[str, Any]:
    """Line style in the colour of the run."""
    return {"color": shown.colour, "width": width, **more}


def column_line(shown: Shown, name: str) -> list[dict[str, Any]]:
    """A column of the steps as it was recorded.

    Left-over ends of epochs, smaller than the batch in force, would make a comb of what follows it.
    """
    steps = full_steps(shown.run.steps)
    values = column(steps, name)
    chosen = extremes(values, shown.points)
    return [
        trace(
            shown, axes_of(shown.run, steps), values, chosen, "",
            line=stroke(shown), showlegend=not shown.alone,
        )
    ]  # fmt: skip


def smoothing(values: Numbers) -> float:
    """Half-life, in steps, that curves are smoothed with: a hundredth of the run."""
    return max(1.0, len(values) / 100.0)


def smoothed(
    shown: Shown, name: str, told: str = "", *, show: bool | None = None
) -> list[dict[str, Any]]:
    """A noisy column: smoothed, and where one run is alone also as it is, faintly."""
    steps = shown.run.steps
    values = column(steps, name)
    if np.isnan(values).all():
        return []
    positions = axes_of(shown.run, steps)
    averaged = smooth(values, smoothing(values))
    legend = not shown.alone if show is None else show
    traces = [
        trace(
            shown, positions, averaged, extremes(averaged, shown.points // 2), told,
            line=stroke(shown), showlegend=legend, legendgroup=shown.label,
        )
    ]  # fmt: skip
    if shown.alone:
        faint = trace(
            shown, positions, values, extremes(values, shown.points), "as measured",
            line=stroke(shown, 1.0), opacity=0.25, showlegend=False, hoverinfo="skip",
        )  # fmt: skip
        traces.insert(0, faint)
    return traces


def held_out(shown: Shown, name: str) -> list[dict[str, Any]]:
    """A score of the evaluations; nothing where it was never measured."""
    evals = shown.run.evals
    values = column(evals, name)
    if np.isnan(values).all():
        return []
    dark = "#222222" if shown.alone else shown.colour
    return [
        trace(
            shown, axes_of(shown.run, evals), values, extremes(values, shown.points), "held-out",
            mode="lines+markers", line={"color": dark, "width": 1.5, "dash": "dot"},
            marker={"size": 7, "color": dark}, legendgroup=shown.label,
        )
    ]  # fmt: skip


def log_axis(series: Sequence[Numbers]) -> dict[str, Any]:
    """A logarithmic axis with few, written-out ticks: 1, 2, 5 in each decade, or decades only."""
    values = np.concatenate(series) if series else np.zeros(0)
    values = values[values > 0]
    if not len(values):
        return {"type": "log"}
    low, high = math.floor(np.log10(values.min())), math.ceil(np.log10(values.max()))
    leading = (1, 2, 5) if high - low <= 3 else (1,)
    ticks = [digit * 10.0**power for power in range(low - 1, high + 1) for digit in leading]
    return {"type": "log", "tickvals": ticks, "ticktext": [number(tick, 1) for tick in ticks]}


def wrapped(text: Any) -> str:
    """Text of users for a hover label: escaped, in short lines, cut where it is very long."""
    return "<br>".join(html.escape(line) for line in textwrap.wrap(str(text), 64)[:8])
