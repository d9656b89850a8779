"""Plots that are no run's own report, as one HTML or PNG file: what plans and replays draw."""

from __future__ import annotations

import html
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from adaptive_platform.errors import UserError
from adaptive_platform.report.series import colour, json_numbers
from adaptive_platform.report.traces import layout
from adaptive_platform.storage import open_location, write_bytes

__all__ = ["Line", "Plot", "check_plot_path", "write_plots"]

_WIDTH_INCHES, _HEIGHT_INCHES = 6.0, 3.6


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a plot."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    """Not a number where there is none."""
    dashed: bool = False
    staircase: bool = False
    """A value holds from its position on, to the next one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """Lines over one horizontal axis."""

    title: str
    x: str
    """What the horizontal axis counts, with its unit."""
    y: str
    lines: Sequence[Line]
    log_x: bool = False
    log_y: bool = False


def check_plot_path(path: str | os.PathLike[str], field: str) -> None:
    """Refuse a file of another kind, or PNG without matplotlib, before anything is computed.

    Args:
        path: The file to write.
        field: What the user calls it, such as `--out`.

    Raises:
        UserError: Says what is allowed, or what to install.
    """
    name = os.fspath(path)
    if not name.endswith((".html", ".png")):
        raise UserError(f"{field} = {name}: must end in .html or .png.")
    if name.endswith(".png"):
        _matplotlib()


def write_plots(plots: Sequence[Plot], path: str | os.PathLike[str], title: str) -> None:
    """Write plots beside each other into one file that needs no network.

    Args:
        plots: In reading order. One name has one colour in all of them.
        path: Ends in `.html` or `.png`; on a local path or any URI that pyarrow knows. Appears
            whole or not at all.
        title: Heading of the page.

    Raises:
        UserError: Another ending, matplotlib is missing, or the file can't be written.
    """
    check_plot_path(path, "file")
    names = list(dict.fromkeys(line.name for plot in plots for line in plot.lines))
    shades = {name: colour(at) for at, name in enumerate(names)}
    png = os.fspath(path).endswith(".png")
    data = _as_png(plots, shades) if png else _as_html(plots, shades, title)
    system, target = open_location(path)
    try:
        write_bytes(system, target, data)
    except OSError as error:
        raise UserError(f"{os.fspath(path)}: it can't be written there: {error}") from error


def _as_html(plots: Sequence[Plot], shades: dict[str, str], title: str) -> bytes:
    from plotly.graph_objects import Figure
    from plotly.io import to_html

    parts = []
    for at, plot in enumerate(plots):
        look = layout(html.escape(plot.y), **({"type": "log"} if plot.log_y else {}))
        look["xaxis"]["title"]["text"] = html.escape(plot.x)
        if plot.log_x:
            look["xaxis"]["type"] = "log"
        look |= {
            "title": {"text": html.escape(plot.title), "font": {"size": 14}},
            "height": 380,
            "margin": {"l": 64, "r": 16, "t": 48, "b": 48},
            "legend": {"orientation": "v"},
        }
        figure = Figure(data=[_trace(line, shades) for line in plot.lines], layout=look)
        parts.append(to_html(figure, full_html=False, include_plotlyjs=at == 0))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{html.escape(title)}</title></head>"
        '<body style="font-family:system-ui,sans-serif;max-width:1100px;margin:24px auto">'
        f"<h1 style='font-size:22px'>{html.escape(title)}</h1>{''.join(parts)}</body></html>\n"
    ).encode()


def _trace(line: Line, shades: dict[str, str]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(line.x) < 50 else "lines",
        "name": html.escape(line.name),
        "x": json_numbers(line.x, digits=7),
        "y": json_numbers(line.y),
        "line": {
            "color": shades[line.name],
            "dash": "dash" if line.dashed else "solid",
            "shape": "hv" if line.staircase else "linear",
        },
    }


def _as_png(plots: Sequence[Plot], shades: dict[str, str]) -> bytes:
    figure = _matplotlib()(
        figsize=(_WIDTH_INCHES * min(len(plots), 2), _HEIGHT_INCHES * -(-len(plots) // 2)),
        dpi=150,
        layout="constrained",
    )
    panels = figure.subplots(-(-len(plots) // 2), min(len(plots), 2), squeeze=False).ravel()
    for panel, plot in zip(panels, plots, strict=False):
        for line in plot.lines:
            panel.plot(
                line.x, line.y, color=shades[line.name], lw=1.5,
                label=line.name.replace("$", r"\$"),  # dollars would start mathematics
                ls="--" if line.dashed else "-",
                marker="o" if len(line.x) < 50 else None, ms=3,
                drawstyle="steps-post" if line.staircase else "default",
            )  # fmt: skip
        panel.set_title(plot.title, loc="left", fontsize=11)
        panel.set_xlabel(plot.x)
        panel.set_ylabel(plot.y)
        panel.set_xscale("log" if plot.log_x else "linear")
        panel.set_yscale("log" if plot.log_y else "linear")
        panel.grid(color="#ececec")
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(frameon=False, fontsize=8)
    for panel in panels[len(plots) :]:
        panel.set_visible(False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _matplotlib() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError(
            "PNG needs matplotlib, which is not installed. "
            "Install it with: pip install adaptive-platform[figures], or write .html."
        ) from error
    return Figure
