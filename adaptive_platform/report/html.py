"""`report.html`: one file with everything in it, for one run or several. It loads nothing."""

from __future__ import annotations

import html
import json
import os
from collections.abc import Sequence
from typing import Any

from adaptive_platform.errors import UserError
from adaptive_platform.report.figures import Panel, panels
from adaptive_platform.report.gains import decision_gains
from adaptive_platform.report.headline import key_figures, recipe_differences, sentences
from adaptive_platform.report.page import page, prose, table
from adaptive_platform.report.run_data import RunData, labels
from adaptive_platform.report.series import AXES, AXIS_TITLES, colour, column
from adaptive_platform.report.wording import count, duration, expected_and_realised, known
from adaptive_platform.storage import open_location, write_bytes

__all__ = ["render_html", "write_html"]

_MOST_DECISIONS = 300
_COSTS = (
    "Steps, samples and seconds: what the same progress costs after the change, as a factor on "
    "before; expected when it was decided → realised until the next change. Progress is counted in "
    "scale-invariant steps (AdaScale)."
)

_SCRIPT = """
const report = JSON.parse(document.getElementById('figures').textContent);
const config = {responsive: true, displaylogo: false, doubleClick: 'autosize',
  modeBarButtons: [['toImage', 'autoScale2d']]};
const overTime = name => report.figures[name].data.every(trace => trace.meta);
const positions = (trace, axis) => trace.meta.axes[axis];
const end = Object.fromEntries(report.axes.map(axis => [axis, Object.values(report.figures)
  .flatMap(figure => figure.data).filter(trace => trace.meta)
  .reduce((most, trace) => positions(trace, axis).reduce((a, b) => Math.max(a, b), most), 0)]));
const whole = axis => [-0.02 * end[axis], 1.02 * end[axis]];
let shown = report.axes[0];
let linking = false;
function link(name, change) {
  if (linking) return;
  const patch = {};
  if ('xaxis.range[0]' in change) {
    patch['xaxis.range'] = [change['xaxis.range[0]'], change['xaxis.range[1]']];
  } else if (change['xaxis.autorange']) { patch['xaxis.range'] = whole(shown); } else return;
  linking = true;
  const others = Object.keys(report.figures).filter(overTime)
    .filter(other => other !== name || change['xaxis.autorange']);
  Promise.all(others.map(other => Plotly.relayout(other, patch)))
    .finally(() => { linking = false; });
}
function choose(axis) {
  shown = axis;
  for (const button of document.querySelectorAll('.axis button')) {
    button.setAttribute('aria-pressed', String(button.dataset.axis === axis));
  }
  for (const [name, figure] of Object.entries(report.figures)) {
    if (!overTime(name)) continue;
    linking = true;
    Plotly.update(name, {x: figure.data.map(trace => positions(trace, axis))},
      {'xaxis.title.text': report.titles[axis], 'xaxis.range': whole(axis)})
      .finally(() => { linking = false; });
  }
}
for (const [name, figure] of Object.entries(report.figures)) {
  if (overTime(name)) {
    figure.layout.xaxis.title.text = report.titles[shown];
    figure.layout.xaxis.range = whole(shown);
    for (const trace of figure.data) trace.x = positions(trace, shown);
  }
  Plotly.newPlot(name, figure.data, figure.layout, config).then(plot => {
    if (overTime(name)) plot.on('plotly_relayout', change => link(name, change));
  });
}
for (const button of document.querySelectorAll('.axis button')) {
  button.addEventListener('click', () => choose(button.dataset.axis));
}
"""


def write_html(runs: Sequence[RunData], path: str | os.PathLike[str]) -> None:
    """Write the report of one run, or of several over each other, as one HTML file.

    Args:
        runs: What `read_run` gave.
        path: The file, on a local path or any URI that pyarrow knows. Appears whole or not at all.

    Raises:
        UserError: There is no run, or the file can't be written.
    """
    text = render_html(runs)
    system, target = open_location(path)
    try:
        write_bytes(system, target, text.encode())
    except OSError as error:
        raise UserError(f"{os.fspath(path)}: the report can't be written there: {error}") from error


def render_html(runs: Sequence[RunData]) -> str:
    """The report as text.

    Raises:
        UserError: There is no run.
    """
    if not runs:
        raise UserError("report: there is no run to show. Give at least one run directory.")
    names = labels(list(runs))
    title = names[0] if len(runs) == 1 else f"{len(runs)} runs compared"
    drawn = panels(runs)
    payload = {
        "axes": AXES,
        "titles": AXIS_TITLES,
        "figures": {panel.name: panel.figure for panel in drawn if not panel.empty},
    }
    body = [
        f"<h1>{html.escape(title)}</h1>",
        _single(runs[0]) if len(runs) == 1 else _comparison(runs, names),
        "<h2>Curves</h2>",
        _axis_buttons(),
        f'<div class="grid">{"".join(_panel(panel) for panel in drawn)}</div>',
        _decisions(runs, names),
        _events(runs, names),
        _recipes(runs, names),
        _environments(runs, names),
    ]
    return page(title, "".join(body), payload, _SCRIPT)


def _single(run: RunData) -> str:
    tiles = "".join(
        f'<div class="tile"><b>{html.escape(value)}</b><span>{html.escape(name)}</span></div>'
        for name, value in key_figures(run).items()
    )
    return (
        f'<p class="path">{html.escape(run.path)}</p><p>{_story(run)}</p>'
        f'<div class="tiles">{tiles}</div>'
    )


def _story(run: RunData) -> str:
    """Three sentences for everybody, and the rest for those who read on."""
    told = [prose(sentence) for sentence in sentences(run)]
    more = f' <span class="note">{" ".join(told[3:])}</span>' if told[3:] else ""
    return " ".join(told[:3]) + more


def _comparison(runs: Sequence[RunData], names: Sequence[str]) -> str:
    figures = [key_figures(run) for run in runs]
    columns = list(dict.fromkeys(name for row in figures for name in row))
    rows = [
        [_swatch(at, name), *(html.escape(row.get(column, "–")) for column in columns)]
        for at, (name, row) in enumerate(zip(names, figures, strict=True))
    ]
    stories = "".join(
        f"<p>{_swatch(at, name)} {_story(run)}</p>"
        for at, (name, run) in enumerate(zip(names, runs, strict=True))
    )
    told = table(["run", *map(html.escape, columns)], rows)
    return f'<div class="runs">{told}</div>{stories}'


def _swatch(at: int, name: str) -> str:
    return f'<span class="run" style="background:{colour(at)}"></span><b>{html.escape(name)}</b>'


def _axis_buttons() -> str:
    buttons = "".join(
        f'<button data-axis="{axis}" aria-pressed="{str(axis == AXES[0]).lower()}">'
        f"{AXIS_TITLES[axis]}</button>"
        for axis in AXES
    )
    return (
        f'<div class="axis">Horizontal axis: {buttons} '
        "<span>Drag to zoom all panels, double-click to go back.</span></div>"
    )


def _panel(panel: Panel) -> str:
    plot = f'<div class="plot" id="{panel.name}"></div>'
    if panel.empty:
        plot = '<div class="nothing">Nothing was recorded.</div>'
    return (
        f'<section class="panel"><h3>{panel.title}</h3><div class="note">{panel.note}</div>'
        f"{plot}</section>"
    )


def _decisions(runs: Sequence[RunData], names: Sequence[str]) -> str:
    rows, kept = [], 0
    for at, (run, name) in enumerate(zip(runs, names, strict=True)):
        changed = column(run.decisions, "old_batch") != column(run.decisions, "new_batch")
        gains = decision_gains(run)
        kept += int((~changed).sum())
        rows += [
            [
                *([_swatch(at, name)] if len(runs) > 1 else []),
                count(row.get("step")),
                count(row.get("samples_seen")),
                f"{count(row.get('old_batch'))} → {count(row.get('new_batch'))}",
                html.escape(str(row.get("reason", ""))),
                *(expected_and_realised(gain, name) for name in ("steps", "samples", "seconds")),
                html.escape(_readable(row.get("inputs"))),
                html.escape(_readable(row.get("candidates"))),
            ]
            for row, gain in zip(run.decisions[changed].to_dict("records"), gains, strict=True)
        ]
    told = f"{count(kept)} more decisions kept the batch as it was." if kept else ""
    if len(rows) > _MOST_DECISIONS:
        told += f" The last {_MOST_DECISIONS} of {count(len(rows))} changes are shown."
        rows = rows[-_MOST_DECISIONS:]
    costs = ("steps", "samples", "seconds")
    head = ["step", "samples seen", "batch", "reason", *costs, "inputs", "candidates"]
    head = ["run", *head] if len(runs) > 1 else head
    told_of = table(head, rows) if rows else "<p>The batch was never changed by a decision.</p>"
    if rows:
        told = f"{_COSTS} {told}"
    note = f'<p class="note">{told}</p>' if told else ""
    return f"<h2>Decisions</h2>{told_of}{note}"


def _events(runs: Sequence[RunData], names: Sequence[str]) -> str:
    rows = []
    for at, (run, name) in enumerate(zip(runs, names, strict=True)):
        rows += [
            [
                *([_swatch(at, name)] if len(runs) > 1 else []),
                count(row.get("step")),
                html.escape(str(row.get("kind", "")).replace("_", " ")),
                html.escape(str(row.get("text", ""))) + _lasted(row.get("seconds")),
            ]
            for row in run.events.tail(200).to_dict("records")
        ]
    if not rows:
        return ""
    head = ["step", "what", "told"]
    told = table(["run", *head] if len(runs) > 1 else head, rows)
    return f"<h2>Events</h2><details><summary>{count(len(rows))} events</summary>{told}</details>"


def _lasted(seconds: Any) -> str:
    return f", written in {duration(seconds)}" if known(seconds) else ""


def _recipes(runs: Sequence[RunData], names: Sequence[str]) -> str:
    parts = ["<h2>Recipe</h2>"]
    if len(runs) > 1:
        rows = [
            [f"<code>{html.escape(name)}</code>", *map(html.escape, values)]
            for name, values in recipe_differences(runs).items()
        ]
        head = ["field", *map(html.escape, names)]
        parts.append(table(head, rows) if rows else "<p>The recipes are the same.</p>")
    for run, name in zip(runs, names, strict=True):
        text = html.escape(run.recipe_text) or "There is no recipe.yaml."
        shown = f"<pre>{text}</pre>"
        parts.append(
            shown
            if len(runs) == 1
            else f"<details><summary>{html.escape(name)}</summary>{shown}</details>"
        )
    return "".join(parts)


def _environments(runs: Sequence[RunData], names: Sequence[str]) -> str:
    known = list(dict.fromkeys(name for run in runs for name in run.environment))
    if not known:
        return ""
    rows = [
        [html.escape(name), *(html.escape(str(run.environment.get(name, "–"))) for run in runs)]
        for name in known
    ]
    head = ["what", *(map(html.escape, names) if len(runs) > 1 else ["value"])]
    return f"<h2>Environment</h2>{table(head, rows)}"


def _readable(text: Any) -> str:
    """JSON as `name value, name value`; other text as it is."""
    try:
        value = json.loads(text)
    except (TypeError, ValueError):
        return str(text or "")
    return _told(value)


def _told(value: Any) -> str:
    if isinstance(value, dict):
        given = {name: item for name, item in value.items() if item is not None}
        return ", ".join(f"{name.replace('_', ' ')} {_told(item)}" for name, item in given.items())
    if isinstance(value, list):
        return "; ".join(_told(item) for item in value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)
