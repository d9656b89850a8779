"""A recipe's planned rates as a table, JSON lines, or a picture."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import PurePosixPath

from rich.console import Console
from rich.table import Table

from adaptive_platform.errors import UserError
from adaptive_platform.storage import open_location, write_bytes
from adaptive_platform.training.rate_plan import PlannedRates, RatePlan

__all__ = ["print_rate_plan", "write_rate_plan"]

_CURVES = (
    ("lr", "learning rate"),
    ("batch", "global batch"),
    ("momentum", "momentum"),
    ("weight_decay", "weight decay"),
)
_ROWS = 11
"""Rows at equal distances; what jumps in between gets rows of its own."""


def print_rate_plan(plan: RatePlan, *, as_json: bool, console: Console) -> None:
    """Print every point as JSON, one a line, or a table of those that tell the story."""
    if as_json:
        for point in plan.points:
            print(json.dumps({"unit": plan.unit} | asdict(point)))
        return
    table = Table(plan.unit, *(title for _, title in _CURVES), box=None)
    for point in _telling(plan.points):
        momentum = "" if point.momentum is None else f"{point.momentum:.4g}"
        table.add_row(
            f"{point.time:.4g}",
            f"{point.lr:.4g}",
            f"{point.batch:,}",
            momentum,
            f"{point.weight_decay:.4g}",
        )
    console.print(table)
    for note in plan.notes:
        console.print(f"note: {note}", markup=False, highlight=False)


def write_rate_plan(plan: RatePlan, title: str, path: str | os.PathLike[str]) -> None:
    """Draw the four curves to an HTML page or a PNG, by the ending of `path`.

    Raises:
        UserError: Another ending, matplotlib is missing, or the file can't be written.
    """
    kind = PurePosixPath(str(path)).suffix.lower()
    if kind not in (".html", ".png"):
        raise UserError(f"--out = {path}: must end in .html or .png.")
    data = _html(plan, title) if kind == ".html" else _png(plan, title)
    system, target = open_location(str(path))
    try:
        write_bytes(system, target, data)
    except OSError as error:
        raise UserError(f"--out = {path}: can't be written ({error}).") from error


def _telling(points: tuple[PlannedRates, ...]) -> Iterator[PlannedRates]:
    """Points at equal distances, and those after a jump of the batch or by half of the rate."""
    every = max((len(points) - 1) // (_ROWS - 1), 1)
    for number, point in enumerate(points):
        before = points[max(number - 1, 0)]
        falls = before.lr > 0 and not 0.5 < point.lr / before.lr < 2.0
        if number % every == 0 or falls or point.batch != before.batch:
            yield point


def _html(plan: RatePlan, title: str) -> bytes:
    from plotly import graph_objects
    from plotly.subplots import make_subplots

    figure = make_subplots(
        rows=2, cols=2, shared_xaxes=True, subplot_titles=[name for _, name in _CURVES]
    )
    times = [point.time for point in plan.points]
    for index, (key, name) in enumerate(_CURVES):
        values = [getattr(point, key) for point in plan.points]
        line = graph_objects.Scatter(x=times, y=values, name=name, mode="lines")
        figure.add_trace(line, row=index // 2 + 1, col=index % 2 + 1)
    figure.update_xaxes(title_text=plan.unit, row=2)
    notes = "<br>".join(plan.notes)
    figure.update_layout(
        title=f"{title}<br><sup>{notes}</sup>" if notes else title,
        showlegend=False,
        template="plotly_white",
    )
    page: str = figure.to_html(include_plotlyjs=True)
    return page.encode()


def _png(plan: RatePlan, title: str) -> bytes:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError(
            "--out: a .png needs matplotlib, which is not installed. Install it with: pip install "
            "adaptive-platform[figures], or write .html."
        ) from error
    figure = Figure(figsize=(10.0, 6.0), dpi=150, layout="constrained")
    times = [point.time for point in plan.points]
    panels = figure.subplots(2, 2, sharex=True).ravel()
    for panel, (key, name) in zip(panels, _CURVES, strict=True):
        values = [getattr(point, key) for point in plan.points]
        panel.plot(times, [float("nan") if value is None else value for value in values])
        panel.set_title(name, loc="left")
        panel.grid(alpha=0.3)
    for panel in panels[2:]:
        panel.set_xlabel(plan.unit)
    figure.suptitle("\n".join([title, *plan.notes]), fontsize="medium")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
