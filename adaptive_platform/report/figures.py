"""The panels of the report as plain plotly figures: dictionaries, nothing is drawn here.

A trace has no `x` of its own: `meta.axes` holds its positions in each unit of `series.AXES`, and
the page draws one of them.
"""

from __future__ import annotations

import html
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from adaptive_platform.report.run_data import RunData, labels
from adaptive_platform.report.series import (
    Numbers,
    axes_of,
    buckets,
    colour,
    column,
    extremes,
    json_numbers,
    smooth,
    staircase,
    time_parts,
)
from adaptive_platform.report.wording import count, percent

__all__ = ["Panel", "panels"]

POINTS = 2000
"""Most points of a trace where one run is shown; several runs share them."""
_OPTIONAL = ("accuracy", "gsnr")
_PART_COLOURS = {
    "compute": "#2f6db3",
    "data": "#d1a22b",
    "reduce": "#c0486f",
    "statistics": "#3b8f5a",
}
_EVENT_SYMBOLS = {
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
        _Shown(run, html.escape(label), colour(at), max(100, POINTS // len(runs)), len(runs) == 1)
        for at, (run, label) in enumerate(zip(runs, labels(list(runs)), strict=True))
    ]
    drawn = [
        _panel(shown, "loss", "Loss", "Training loss, smoothed, and held-out loss.", "loss", _loss),
        _panel(
            shown, "accuracy", "Accuracy", "Share of samples that were right, training smoothed.",
            "accuracy", _accuracy, tickformat=".0%",
        ),
        _panel(
            shown, "batch", "Global batch", "Samples per optimizer step; markers are decisions.",
            "samples per step", _batch, rangemode="tozero",
        ),
        _panel(
            shown, "noise", "Gradient noise scale",
            "Batch at which noise equals signal; dashed: the batch in use.",
            "samples, log scale", _noise, type="log",
        ),
        _panel(
            shown, "lr", "Learning rate", "After schedule and learning-rate rule.",
            "learning rate", lambda run: _line(run, "lr"), rangemode="tozero",
        ),
        _panel(
            shown, "gain", "AdaScale gain", "Base-batch steps that one step is worth.",
            "gain", lambda run: _line(run, "gain"),
        ),
        _panel(
            shown, "efficiency", "Statistical efficiency",
            "Progress per sample, against the base batch.",
            "efficiency", lambda run: _line(run, "efficiency"), tickformat=".0%",
        ),
        _panel(
            shown, "gsnr", "Gradient signal-to-noise ratio", "Mean over parameters.",
            "GSNR, log scale", lambda run: _line(run, "gsnr"), type="log",
        ),
        _panel(
            shown, "throughput", "Throughput", "All workers together.",
            "samples per second", lambda run: _smoothed(run, "samples_per_second"),
            rangemode="tozero",
        ),
        _time_split(shown),
        _panel(
            shown, "workers", "Workers and events", "Workers that took part, and what happened.",
            "workers", _workers, rangemode="tozero", dtick=1 if _most_workers(runs) < 8 else None,
        ),
    ]  # fmt: skip
    return [panel for panel in drawn if panel.name not in _OPTIONAL or not panel.empty]


@dataclass(frozen=True, slots=True)
class _Shown:
    """A run with the way it is shown."""

    run: RunData
    label: str
    """Escaped for HTML, which is also how plotly reads text."""
    colour: str
    points: int
    alone: bool


def _panel(
    shown: Sequence[_Shown],
    name: str,
    title: str,
    note: str,
    unit: str,
    draw: Callable[[_Shown], list[dict[str, Any]]],
    **yaxis: Any,
) -> Panel:
    traces = [trace for run in shown for trace in draw(run)]
    return Panel(name, title, note, {"data": traces, "layout": _layout(unit, **yaxis)})


def _layout(unit: str, **yaxis: Any) -> dict[str, Any]:
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
        "modebar": {"orientation": "v", "bgcolor": "rgba(255,255,255,0.7)"},
        "showlegend": True,
    }


def _trace(
    shown: _Shown,
    positions: dict[str, Numbers],
    values: Numbers,
    chosen: Any,
    name: str,
    **style: Any,
) -> dict[str, Any]:
    axes = {unit: json_numbers(at[chosen], 7) for unit, at in positions.items()}
    full = name if shown.alone else f"{shown.label}: {name}" if name else shown.label
    return {
        "type": "scatter",
        "mode": "lines",
        "name": full or shown.label,
        "y": json_numbers(values[chosen]),
        "meta": {"axes": axes},
        **style,
    }


def _stroke(shown: _Shown, width: float = 2.0, **more: Any) -> dict[str, Any]:
    return {"color": shown.colour, "width": width, **more}


def _line(shown: _Shown, name: str) -> list[dict[str, Any]]:
    steps = shown.run.steps
    values = column(steps, name)
    chosen = extremes(values, shown.points)
    return [
        _trace(
            shown, axes_of(shown.run, steps), values, chosen, "",
            line=_stroke(shown), showlegend=not shown.alone,
        )
    ]  # fmt: skip


def _smoothed(
    shown: _Shown, name: str, told: str = "", *, show: bool | None = None
) -> list[dict[str, Any]]:
    """A noisy column: smoothed, and where one run is alone also as it is, faintly."""
    steps = shown.run.steps
    values = column(steps, name)
    if np.isnan(values).all():
        return []
    positions = axes_of(shown.run, steps)
    averaged = smooth(values, max(1.0, len(values) / 100.0))
    legend = not shown.alone if show is None else show
    traces = [
        _trace(
            shown, positions, averaged, extremes(averaged, shown.points // 2), told,
            line=_stroke(shown), showlegend=legend, legendgroup=shown.label,
        )
    ]  # fmt: skip
    if shown.alone:
        faint = _trace(
            shown, positions, values, extremes(values, shown.points), "as measured",
            line=_stroke(shown, 1.0), opacity=0.25, showlegend=False, hoverinfo="skip",
        )  # fmt: skip
        traces.insert(0, faint)
    return traces


def _held_out(shown: _Shown, name: str) -> list[dict[str, Any]]:
    evals = shown.run.evals
    values = column(evals, name)
    if np.isnan(values).all():
        return []
    dark = "#222222" if shown.alone else shown.colour
    return [
        _trace(
            shown, axes_of(shown.run, evals), values, extremes(values, shown.points), "held-out",
            mode="lines+markers", line={"color": dark, "width": 1.5, "dash": "dot"},
            marker={"size": 7, "color": dark}, legendgroup=shown.label,
        )
    ]  # fmt: skip


def _loss(shown: _Shown) -> list[dict[str, Any]]:
    return _smoothed(shown, "loss", "training", show=True) + _held_out(shown, "loss")


def _accuracy(shown: _Shown) -> list[dict[str, Any]]:
    return _smoothed(shown, "accuracy", "training", show=True) + _held_out(shown, "accuracy")


def _batch(shown: _Shown) -> list[dict[str, Any]]:
    steps, decisions = shown.run.steps, shown.run.decisions
    values = column(steps, "global_batch")
    traces = [
        _trace(
            shown, axes_of(shown.run, steps), values, staircase(values, shown.points), "",
            line=_stroke(shown, shape="hv"), showlegend=not shown.alone,
        )
    ]  # fmt: skip
    old, new = column(decisions, "old_batch"), column(decisions, "new_batch")
    changed = np.flatnonzero((old != new) & np.isfinite(new))[-shown.points :]
    if len(changed):
        rows = decisions.iloc[changed]
        texts = [
            f"<b>{count(row.old_batch)} → {count(row.new_batch)}</b> at step {count(row.step)}"
            f"<br>{_wrapped(row.reason)}"
            for row in rows.itertuples()
        ]
        traces.append(
            _trace(
                shown, axes_of(shown.run, decisions), new, changed, "decisions",
                mode="markers", text=texts, hovertemplate="%{text}<extra></extra>",
                marker={"size": 9, "color": "white", "line": {"color": shown.colour, "width": 2}},
                showlegend=shown.alone,
            )
        )  # fmt: skip
    return traces


def _noise(shown: _Shown) -> list[dict[str, Any]]:
    steps = shown.run.steps
    values = column(steps, "noise_scale")
    values = np.where(values > 0, values, np.nan)
    if np.isnan(values).all():
        return []
    positions = axes_of(shown.run, steps)
    traces = [
        _trace(
            shown, positions, values, extremes(values, shown.points), "noise scale",
            line=_stroke(shown),
        )
    ]  # fmt: skip
    batch = column(steps, "global_batch")
    traces.append(
        _trace(
            shown, positions, batch, staircase(batch, shown.points), "batch in use",
            line={"color": shown.colour if not shown.alone else "#777777", "width": 1.5,
                  "dash": "dash", "shape": "hv"},
            showlegend=shown.alone,
        )
    )  # fmt: skip
    return traces


def _workers(shown: _Shown) -> list[dict[str, Any]]:
    steps, events = shown.run.steps, shown.run.events
    values = column(steps, "world_size")
    traces = [
        _trace(
            shown, axes_of(shown.run, steps), values, staircase(values, shown.points), "",
            line=_stroke(shown, shape="hv"), showlegend=not shown.alone,
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
        traces.append(
            _trace(
                shown, axes_of(shown.run, rows), height, np.arange(len(rows)),
                html.escape(kind.replace("_", " ")),
                mode="markers", text=[_wrapped(text) for text in texts],
                hovertemplate="%{text}<extra></extra>",
                marker={"size": 9, "symbol": _EVENT_SYMBOLS.get(kind, "star"),
                        "color": shown.colour, "line": {"width": 1.5}},
            )
        )  # fmt: skip
    return traces


def _time_split(shown: Sequence[_Shown]) -> Panel:
    """Shares of the step time: over the run where it is alone, else one bar per run."""
    title, note = "Where the time goes", "Shares of the step time."
    if len(shown) == 1:
        traces = _time_areas(shown[0])
        layout = _layout("share of step time", tickformat=".0%", range=[0, 1])
        return Panel("time", title, note, {"data": traces, "layout": layout})
    totals = {run.label: _shares(run.run) for run in shown}
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
    layout = _layout("", autorange="reversed")
    layout["xaxis"] |= {"tickformat": ".0%", "range": [0, 1]}
    layout["barmode"] = "stack"
    return Panel("time", title, note, {"data": traces, "layout": layout})


def _time_areas(shown: _Shown) -> list[dict[str, Any]]:
    parts = time_parts(shown.run.steps)
    last, sums = buckets(list(parts.values()), 200)
    total = np.sum(sums, axis=0) if sums else np.zeros(0)
    positions = axes_of(shown.run, shown.run.steps)
    traces = []
    for name, spent in zip(parts, sums, strict=True):
        share = np.divide(spent, total, out=np.full(len(spent), np.nan), where=total > 0)
        at = {unit: values[last] for unit, values in positions.items()}
        traces.append(
            _trace(
                shown, at, share, np.arange(len(share)), name,
                stackgroup="time", line={"width": 0}, fillcolor=_PART_COLOURS[name],
                hovertemplate="%{y:.1%}",
            )
        )  # fmt: skip
    return traces


def _shares(run: RunData) -> dict[str, float]:
    sums = {name: float(spent.sum()) for name, spent in time_parts(run.steps).items()}
    total = sum(sums.values())
    return {name: value / total for name, value in sums.items()} if total > 0 else {}


def time_sentence(run: RunData) -> str:
    """Shares of the step time in words; empty where no time was recorded."""
    told = {"compute": "computing", "data": "waiting for data", "reduce": "waiting for reduction",
            "statistics": "statistics"}  # fmt: skip
    return ", ".join(f"{percent(share)} {told[name]}" for name, share in _shares(run).items())


def _most_workers(runs: Sequence[RunData]) -> float:
    sizes = [column(run.steps, "world_size") for run in runs if len(run.steps)]
    return max((float(np.nanmax(size)) for size in sizes if not np.isnan(size).all()), default=1.0)


def _wrapped(text: Any) -> str:
    return "<br>".join(html.escape(line) for line in textwrap.wrap(str(text), 64)[:8])
