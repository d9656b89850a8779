"""`sweep.html`: best trials, parallel coordinates, importance, learning curves, winning recipe."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import numpy as np

from adaptive_platform.errors import UserError
from adaptive_platform.report.html import page, table
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
  Plotly.newPlot(name, figure.data, figure.layout, {responsive: true, displaylogo: false});
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
        f"<p>{html.escape(_story(rows, best, sweep.metric))}</p>",
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
            "One line per scored trial. Drag along an axis to keep only some of them.",
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
    """One axis per field, the score on the last one and as colour."""
    names = [n for n in sweep.space if any(n in row.fields for row in ranked)]
    scores = [float(row.score(sweep.metric) or 0.0) for row in ranked]
    axes = [_axis(name, [row.fields.get(name) for row in ranked]) for name in names]
    axes.append({"label": sweep.metric, "values": json_numbers(scores)})
    lines = {
        "type": "parcoords",
        "dimensions": axes,
        "line": {
            "color": json_numbers(scores),
            "colorscale": "Viridis",
            "reversescale": sweep.metric == "loss",
            "showscale": True,
        },
    }
    layout = {"margin": {"l": 80, "r": 60, "t": 50, "b": 20}, "paper_bgcolor": "white"}
    return {"data": [lines] if ranked else [], "layout": layout}


def _axis(name: str, values: list[Any]) -> dict[str, Any]:
    """An axis of numbers, logarithmic where they span a decade, or of named levels."""
    known = [value for value in values if value is not None]
    numeric = all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in known)
    if numeric and len(known) == len(values):
        numbers = np.array([float(v) for v in values])
        if numbers.min() > 0 and numbers.max() / numbers.min() >= 10:
            ticks = np.linspace(np.log10(numbers.min()), np.log10(numbers.max()), 5)
            return {
                "label": name,
                "values": json_numbers(np.log10(numbers)),
                "tickvals": json_numbers(ticks),
                "ticktext": [number(10.0**tick, 2) for tick in ticks],
            }
        return {"label": name, "values": json_numbers(numbers)}
    texts = ["–" if v is None else number(v) if isinstance(v, float) else str(v) for v in values]
    levels = sorted(set(texts))
    return {
        "label": name,
        "values": [levels.index(text) for text in texts],
        "tickvals": list(range(len(levels))),
        "ticktext": levels,
    }


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
    }
    return {"data": traces, "layout": layout}
