"""`report.html`: one file with everything in it, for one run or several. It loads nothing."""

from __future__ import annotations

import html
import json
import os
from collections.abc import Iterable, Sequence
from typing import Any

from adaptive_platform.errors import UserError
from adaptive_platform.report.figures import Panel, panels
from adaptive_platform.report.gains import decision_gains
from adaptive_platform.report.headline import key_figures, recipe_differences, sentences
from adaptive_platform.report.run_data import RunData, labels
from adaptive_platform.report.series import AXES, AXIS_TITLES, colour, column
from adaptive_platform.report.wording import count, duration, expected_and_realised, known
from adaptive_platform.storage import open_location, write_bytes

__all__ = ["page", "render_html", "table", "write_html"]

_MOST_DECISIONS = 300
_COSTS = (
    "Steps, samples and seconds: what the same progress costs after the change, as a factor on "
    "before; expected when it was decided → realised until the next change. Progress is counted in "
    "scale-invariant steps (AdaScale)."
)

_STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0; background: #f6f7f8; color: #222;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 1280px; margin: 0 auto; padding: 28px 24px 64px; }
h1 { font-size: 24px; font-weight: 650; margin: 0 0 4px; }
h2 { font-size: 17px; font-weight: 650; margin: 36px 0 10px; }
h3 { font-size: 14px; font-weight: 650; margin: 0; }
p { margin: 0 0 8px; max-width: 100ch; }
.path, .note { color: #6a6f76; font-size: 13px; }
.tiles { display: flex; flex-wrap: wrap; gap: 10px; margin: 16px 0 4px; }
.tile { background: #fff; border: 1px solid #e3e5e8; border-radius: 8px; padding: 10px 14px; }
.tile b { display: block; font-size: 19px; font-weight: 650; white-space: nowrap; }
.tile span { color: #6a6f76; font-size: 12px; }
.runs { margin: 14px 0; }
.run { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 7px; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 520px), 1fr));
  gap: 14px; }
.panel { background: #fff; border: 1px solid #e3e5e8; border-radius: 8px;
  padding: 12px 12px 4px; min-width: 0; }
.plot { height: 300px; }
.nothing { height: 60px; display: flex; align-items: center; color: #8a8f96; font-size: 13px; }
.axis { display: flex; gap: 6px; align-items: center; margin: 0 0 12px; font-size: 13px;
  color: #6a6f76; }
.axis button { font: inherit; border: 1px solid #d5d8dc; background: #fff; border-radius: 6px;
  padding: 3px 10px; cursor: pointer; color: #333; }
.axis button[aria-pressed=true] { background: #2f3a46; border-color: #2f3a46; color: #fff; }
.scroll { overflow-x: auto; background: #fff; border: 1px solid #e3e5e8; border-radius: 8px; }
table { border-collapse: collapse; width: 100%; font-size: 13px; }
th, td { text-align: left; padding: 6px 12px; border-bottom: 1px solid #eef0f2;
  vertical-align: top; }
th { color: #6a6f76; font-weight: 600; white-space: nowrap; }
tr:last-child td { border-bottom: 0; }
details { margin: 8px 0; }
summary { cursor: pointer; color: #2f6db3; }
pre { background: #fff; border: 1px solid #e3e5e8; border-radius: 8px; padding: 12px 16px;
  overflow-x: auto; font: 12.5px/1.5 ui-monospace, Menlo, Consolas, monospace; }
@media print { body { background: #fff; } .axis { display: none; } }
"""

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

# No address is allowed at all, so that the page can't load anything even by mistake.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; font-src data:"
)


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


def page(title: str, body: str, payload: Any, script: str) -> str:
    """One HTML file in the look of the reports, with plotly inside; it may load nothing.

    Args:
        title: Plain text.
        body: What `<main>` holds, as HTML.
        payload: JSON for the script, in the element with the id `figures`.
        script: JavaScript that draws; `Plotly` is there.
    """
    from plotly.offline import get_plotlyjs

    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head>\n"
        f"<body><main>{body}</main>\n"
        f'<script type="application/json" id="figures">{_json(payload)}</script>\n'
        f"<script>{get_plotlyjs()}</script>\n<script>{script}</script></body></html>\n"
    )


def _json(value: Any) -> str:
    """JSON that can't end the script element it stands in, whatever names it holds."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


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
    told = [html.escape(sentence).replace(" %", "&nbsp;%") for sentence in sentences(run)]
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


def table(head: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are already HTML."""
    header = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{header}</tr>{body}</table></div>'


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
