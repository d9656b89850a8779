"""Scaling efficiency of every plan over the number of workers, as a page or a picture."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import PurePosixPath

from adaptive_platform.bench.plans import PlanRow
from adaptive_platform.errors import UserError
from adaptive_platform.storage import open_location, write_bytes

__all__ = ["counts_up_to", "write_plans"]


def counts_up_to(workers: int) -> list[int]:
    """Powers of two below a number of workers, and the number itself: the points of a curve."""
    return [count for count in (2**power for power in range(1, 17)) if count < workers] + [workers]


def write_plans(rows: Sequence[PlanRow], title: str, path: str | os.PathLike[str]) -> None:
    """Draw one curve per plan: efficiency where it is known, else seconds of a reduction.

    Args:
        rows: Of several numbers of workers.
        title: Of the picture.
        path: Ends in `.html` (one file that needs no network) or `.png`.

    Raises:
        UserError: Another ending, matplotlib is missing, or the file can't be written.
    """
    kind = PurePosixPath(str(path)).suffix.lower()
    if kind not in (".html", ".png"):
        raise UserError(f"--out = {path}: must end in .html or .png.")
    efficient = rows[0].efficiency is not None
    label = "scaling efficiency" if efficient else "seconds of one reduction"
    curves: dict[str, tuple[list[int], list[float]]] = {}
    for row in sorted(rows, key=lambda each: each.workers):
        counts, values = curves.setdefault(row.plan, ([], []))
        counts.append(row.workers)
        values.append(row.seconds if row.efficiency is None else row.efficiency)
    draw = _page if kind == ".html" else _png
    system, target = open_location(path)
    data = draw(curves, title, label, logarithmic=not efficient)
    try:
        write_bytes(system, target, data)
    except OSError as error:
        raise UserError(f"--out = {path}: can't be written ({error}).") from error


def _page(
    curves: dict[str, tuple[list[int], list[float]]], title: str, label: str, *, logarithmic: bool
) -> bytes:
    import plotly.graph_objects as go

    figure = go.Figure()
    for name, (counts, values) in sorted(curves.items()):
        figure.add_scatter(x=counts, y=values, name=name, mode="lines+markers")
    figure.update_layout(title=title, xaxis_title="workers", yaxis_title=label)
    figure.update_xaxes(type="log")
    figure.update_yaxes(type="log" if logarithmic else "linear", rangemode="tozero")
    return str(figure.to_html(include_plotlyjs=True)).encode()


def _png(
    curves: dict[str, tuple[list[int], list[float]]], title: str, label: str, *, logarithmic: bool
) -> bytes:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError(
            "--out: a .png needs matplotlib, which is not installed. Install it with: "
            "pip install adaptive-platform[figures], or write an .html."
        ) from error
    figure = Figure(figsize=(8.0, 4.8), dpi=150, layout="constrained")
    axes = figure.subplots()
    for name, (counts, values) in sorted(curves.items()):
        axes.plot(counts, values, marker=".", label=name)
    axes.set_xscale("log", base=2)
    if logarithmic:
        axes.set_yscale("log")
    axes.set(title=title, xlabel="workers", ylabel=label)
    axes.legend()
    target = io.BytesIO()
    figure.savefig(target, format="png")
    return target.getvalue()
