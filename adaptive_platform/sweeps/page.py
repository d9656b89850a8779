"""`sweep.html`: best trials, parallel coordinates, importance, learning curves, winning recipe."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from adaptive_platform.errors import UserError
from adaptive_platform.report.page import page, prose, table
from adaptive_platform.report.run_data import read_run
from adaptive_platform.report.series import colour, column, json_numbers
from adaptive_platform.report.wording import count, duration, number, percent
from adaptive_platform.sweeps.config import Sweep
from adaptive_platform.sweeps.importance import MIN_TRIALS, importance
from adaptive_platform.sweeps.progress import told
from adaptive_platform.sweeps.results import TrialRow, best_of

__all__ = ["render_page"]

_BEST_SHOWN = 20
_CURVES_SHOWN = 40
_MARGINS = {"l": 60, "r": 20, "t": 10, "b": 44}

_SCRIPT = """
const figures = JSON.parse(document.getElementById('figures').textContent);
for (const [name, figure] of Object.entries(figures)) {
  Plotly.newPlot(name, figure.data, figure.layout, {responsive: true, displaylogo: false,
    modeBarButtons: [['toImage', 'autoScale2d']]});
}
"""


def render_page(sweep: Sweep, rows: Sequence[TrialRow], best_recipe: str) -> str:
    """The page as text.

    Args:
        sweep: What was swept.
        rows: All trials.
        best_recipe: The winning recipe as YAML; empty where no trial has a score.
    """
    ranked = _ranked(rows, sweep.metric)
    best = best_of(rows, sweep.metric)
    figures = {
        "coordinates": _coordinates(ranked, sweep),
        "importance": _importance(ranked, sweep.metric),
        "curves": _curves(ranked, sweep.metric),
    }
    drawn = {name: figure for name, figure in figures.items() if figure["data"]}
    parts = [
        f"<h1>{html.escape(sweep.name)}</h1>",
        f"<p>{html.escape(sweep.description)}</p>" if sweep.description else "",
        f"<p>{prose(_story(rows, best, sweep.metric))}</p>",
        "<h2>Trials</h2>",
        _trials(ranked, rows, best),
        "<h2>What mattered</h2>",
        '<div class="grid">',
        _panel(
            "importance",
            "Importance",
            "Share of the differences in score that a random forest ascribes to each field.",
            drawn,
            f"Fewer than {MIN_TRIALS} scored trials, or no difference: nothing can be said.",
        ),
        _panel(
            "curves",
            "Learning curves",
            f"Held-out {sweep.metric} over samples seen; the best trial is drawn thick.",
            drawn,
            "No trial was scored.",
        ),
        "</div>",
        "<h2>Parallel coordinates</h2>",
        _panel(
            "coordinates",
            "Fields and score",
            "One line per scored trial; the best is thick, and the paler the worse.",
            drawn,
            "No trial was scored.",
        ),
        "<h2>Winning recipe</h2>",
        f"<p>Run it with <code>adaptive-platform train best.yaml</code>.</p>"
        f"<pre>{html.escape(best_recipe)}</pre>"
        if best_recipe
        else "<p>No trial has a score.</p>",
        "<h2>Sweep</h2>",
        f"<pre>{html.escape(sweep.to_yaml())}</pre>",
    ]
    return page(sweep.name, "".join(parts), drawn, _SCRIPT)


def _ranked(rows: Sequence[TrialRow], metric: str) -> list[TrialRow]:
    sign = 1.0 if metric == "loss" else -1.0
    scored = [row for row in rows if row.score(metric) is not None]
    return sorted(scored, key=lambda row: sign * (row.score(metric) or 0.0))


def _story(rows: Sequence[TrialRow], best: TrialRow | None, metric: str) -> str:
    kinds = [row.status for row in rows]
    parts = [
        f"{kinds.count(status)} {status}"
        for status in ("done", "stopped early", "failed", "running", "waiting")
        if kinds.count(status)
    ]
    what = f"{len(rows)} trials: {', '.join(parts)}."
    if best is None:
        return what
    score = percent(best.accuracy) if metric == "accuracy" else number(best.loss)
    spent = duration(sum(row.seconds for row in rows))
    return (
        f"{what} The best {metric} is {score}, of trial {best.trial} with {told(best.fields)}. "
        f"All trials together took {spent}."
    )


def _trials(ranked: list[TrialRow], rows: Sequence[TrialRow], best: TrialRow | None) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row.fields))
    unscored = [row for row in rows if row not in ranked]
    body = []
    for row in [*ranked[:_BEST_SHOWN], *unscored]:
        fields = [_cell(row.fields[name]) if name in row.fields else "–" for name in names]
        marked = f"<b>{html.escape(row.trial)}</b>" if row is best else html.escape(row.trial)
        body.append(
            [
                marked,
                html.escape(row.status),
                percent(row.accuracy),
                number(row.loss),
                f"{row.percent:.0f} %",
                count(row.step),
                count(row.batch),
                duration(row.seconds),
                *fields,
                html.escape(row.message),
            ]
        )
    head = ["trial", "status", "accuracy", "loss", "run", "steps", "batch", "time"]
    told_of = "" if len(ranked) <= _BEST_SHOWN else f"<p>The best {_BEST_SHOWN} are shown.</p>"
    return told_of + table([*head, *(f"<code>{html.escape(n)}</code>" for n in names), ""], body)


def _cell(value: Any) -> str:
    return number(value) if isinstance(value, float) else html.escape(str(value))


def _panel(name: str, title: str, note: str, drawn: dict[str, Any], nothing: str) -> str:
    plot = f'<div class="plot" id="{name}"></div>'
    if name not in drawn:
        plot = f'<div class="nothing">{nothing}</div>'
    return f'<section class="panel"><h3>{title}</h3><div class="note">{note}</div>{plot}</section>'


def _coordinates(ranked: list[TrialRow], sweep: Sweep) -> dict[str, Any]:
    """One vertical axis per field and one for the score; plain lines, which need no WebGL."""
    names = [n for n in sweep.space if any(n in row.fields for row in ranked)]
    scores = [float(row.score(sweep.metric) or 0.0) for row in ranked]
    axes = [_axis([row.fields.get(name) for row in ranked]) for name in names]
    axes.append(_axis(scores))
    last = len(ranked) - 1
    traces = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": row.trial,
            "x": list(range(len(axes))),
            "y": json_numbers([axis.heights[at] for axis in axes]),
            "line": {"color": _shade(at / last if last else 0.0), "width": 4 if at == 0 else 1.5},
            "hovertemplate": f"{html.escape(told(row.fields))}<br>"
            f"{sweep.metric} {number(scores[at])}<extra>{html.escape(row.trial)}</extra>",
            "showlegend": False,
        }
        for at, row in reversed(list(enumerate(ranked)))
    ]
    titles = [*names, sweep.metric]
    layout = {
        "margin": {"l": 60, "r": 60, "t": 16, "b": 40},
        "plot_bgcolor": "white",
        "xaxis": {
            "tickvals": list(range(len(axes))),
            "ticktext": [f"<b>{html.escape(title)}</b>" for title in titles],
            "showgrid": False,
            "zeroline": False,
            "range": [-0.15, len(axes) - 0.85],
        },
        "yaxis": {"visible": False, "range": [-0.05, 1.05]},
        "hovermode": "closest",
        "shapes": [
            {"type": "line", "x0": at, "x1": at, "y0": 0, "y1": 1, "line": {"color": "#9aa0a6"}}
            for at in range(len(axes))
        ],
        "annotations": [
            {
                "x": at,
                "y": height,
                "text": html.escape(text),
                "showarrow": False,
                "xanchor": "left",
                "xshift": 4,
                "font": {"size": 11, "color": "#444"},
                "bgcolor": "rgba(255,255,255,0.75)",
            }
            for at, axis in enumerate(axes)
            for height, text in axis.ticks
        ],
    }
    return {"data": traces if ranked else [], "layout": layout}


@dataclass(frozen=True, slots=True)
class _Axis:
    heights: list[float]
    """Where each trial crosses it, in [0, 1]."""
    ticks: list[tuple[float, str]]
    """Heights and what stands there."""


def _axis(values: list[Any]) -> _Axis:
    """An axis of numbers, logarithmic where they span a decade, or of named levels."""
    numeric = all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values)
    if numeric and len(set(values)) > 4:
        numbers = np.array([float(v) for v in values])
        low, high = numbers.min(), numbers.max()
        log = low > 0 and high / low >= 10
        scaled = (
            np.log(numbers / low) / np.log(high / low) if log else (numbers - low) / (high - low)
        )
        shares = (0.0, 0.25, 0.5, 0.75, 1.0)
        marks = [low * (high / low) ** s if log else low + s * (high - low) for s in shares]
        return _Axis(
            [float(v) for v in scaled],
            [(share, number(mark, 3)) for share, mark in zip(shares, marks, strict=True)],
        )
    levels = sorted({_level(v) for v in values})
    step = 1.0 / max(len(levels) - 1, 1)
    heights = {level: at * step if len(levels) > 1 else 0.5 for at, level in enumerate(levels)}
    ticks = [(heights[level], level[2]) for level in levels]
    return _Axis([heights[_level(value)] for value in values], ticks)


def _level(value: Any) -> tuple[int, float, str]:
    """Orders named levels: what was not drawn, then numbers, then text; last, what is shown."""
    if value is None:
        return 0, 0.0, "–"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return 1, float(value), number(value) if isinstance(value, float) else str(value)
    return 2, 0.0, str(value)


def _shade(share: float) -> str:
    """From the first colour of the reports for the best trial to light grey for the worst."""
    best, worst = (47, 109, 179), (214, 216, 220)
    mixed = [round(b + (w - b) * share) for b, w in zip(best, worst, strict=True)]
    return f"rgb({mixed[0]},{mixed[1]},{mixed[2]})"


def _importance(ranked: list[TrialRow], metric: str) -> dict[str, Any]:
    scores = [float(row.score(metric) or 0.0) for row in ranked]
    found = importance([dict(row.fields) for row in ranked], scores)
    names = list(found)[::-1]
    bars = {
        "type": "bar",
        "orientation": "h",
        "y": names,
        "x": [found[name] for name in names],
        "marker": {"color": colour(0)},
        "hovertemplate": "%{y}: %{x:.0%}<extra></extra>",
    }
    layout = {
        "margin": _MARGINS | {"l": 170},
        "xaxis": {"tickformat": ".0%", "range": [0, 1]},
        "plot_bgcolor": "white",
    }
    return {"data": [bars] if found else [], "layout": layout}


def _curves(ranked: list[TrialRow], metric: str) -> dict[str, Any]:
    traces = []
    for at, row in reversed(list(enumerate(ranked[:_CURVES_SHOWN]))):
        try:
            evals = read_run(row.run_dir).evals
        except UserError:  # its directory was moved or deleted; the table still has its score
            continue
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": row.trial,
                "x": json_numbers(column(evals, "samples_seen"), 8),
                "y": json_numbers(column(evals, metric)),
                "line": {"width": 3 if at == 0 else 1, "color": colour(at)},
                "opacity": 1.0 if at == 0 else 0.6,
                "hovertemplate": f"{html.escape(told(row.fields))}<br>%{{y:.4g}}"
                "<extra>%{fullData.name}</extra>",
            }
        )
    layout = {
        "margin": _MARGINS,
        "plot_bgcolor": "white",
        "xaxis": {"title": {"text": "samples seen"}, "gridcolor": "#eef0f2"},
        "yaxis": {"title": {"text": f"held-out {metric}"}, "gridcolor": "#eef0f2"},
        # The best, drawn last, is named first, below the buttons.
        "legend": {"traceorder": "reversed", "y": 0.9},
    }
    return {"data": traces, "layout": layout}
