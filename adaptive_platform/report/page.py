"""The frame of every page that people open: its look, plotly inside, and leave to load nothing."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["page", "prose", "table"]

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

# No address is allowed at all, so that the page can't load anything even by mistake.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; font-src data:"
)


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


def prose(text: str) -> str:
    """Plain text as HTML, in which no line ends within a number with its units."""
    within = r"(?<=\d) (?=(?:s|min|h|d)\b|%)|(?<=\d min) (?=\d)|(?<=\d [hd]) (?=\d)"
    return re.sub(within, "&nbsp;", html.escape(text))


def _json(value: Any) -> str:
    """JSON that can't end the script element it stands in, whatever names it holds."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


def table(head: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are already HTML."""
    header = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{header}</tr>{body}</table></div>'
