"""The main curves as one static picture, for a README, a paper or a pull request."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from adaptive_platform.errors import UserError
from adaptive_platform.report.run_data import RunData, labels
from adaptive_platform.report.series import axes_of, colour, column, full_steps, smooth
from adaptive_platform.storage import open_location, write_bytes

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["write_png"]


def write_png(runs: Sequence[RunData], path: str | os.PathLike[str]) -> None:
    """Draw four panels: score, batch with decisions, learning rate and gain, noise scale.

    Args:
        runs: What `read_run` gave; they are drawn over each other.
        path: The file, on a local path or any URI that pyarrow knows. Appears whole or not at all.

    Raises:
        UserError: There is no run, matplotlib is missing, or the file can't be written.
    """
    if not runs:
        raise UserError("report: there is no run to show. Give at least one run directory.")
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import EngFormatter
    except ImportError as error:
        raise UserError(
            "format = png: needs matplotlib, which is not installed. "
            "Install it with: pip install adaptive-platform[figures]"
        ) from error
    figure = Figure(figsize=(12.0, 6.4), dpi=150, layout="constrained")
    (score, batch), (rate, noise) = figure.subplots(2, 2, sharex=True)
    names = labels(list(runs))
    has_accuracy = any(np.isfinite(column(run.evals, "accuracy")).any() for run in runs)
    kind = "accuracy" if has_accuracy else "loss"
    for at, (run, name) in enumerate(zip(runs, names, strict=True)):
        label = name.replace("$", r"\$")  # dollars would start mathematics
        _draw_score(score, run, colour(at), label, kind)
        _draw_batch(batch, run, colour(at))
        _draw_column(rate, run, full_steps(run.steps), "lr", colour(at))
        _draw_noise(noise, run, colour(at))
    _finish(score, f"Held-out {kind} (faint: training)", "")
    _finish(batch, "Global batch (circles: decisions)", "samples per step")
    _finish(rate, "Learning rate" + _draw_gain(rate, runs), "")
    _finish(noise, "Noise scale (dashed: batch in use)", "samples")
    for panel in (rate, noise):
        panel.set_xlabel("samples seen")
        panel.xaxis.set_major_formatter(EngFormatter(sep=""))
    if len(runs) > 1:
        score.legend(frameon=False, fontsize=9)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    system, target = open_location(path)
    try:
        write_bytes(system, target, buffer.getvalue())
    except OSError as error:
        raise UserError(f"{os.fspath(path)}: the picture can't be written: {error}") from error


def _draw_score(panel: Any, run: RunData, shade: str, label: str, name: str) -> None:
    values = column(run.steps, name)
    if np.isfinite(values).any():
        at = axes_of(run, run.steps)["samples"]
        panel.plot(at, smooth(values, max(1.0, len(values) / 100.0)), color=shade, alpha=0.45, lw=1)
    at = axes_of(run, run.evals)["samples"]
    panel.plot(at, column(run.evals, name), color=shade, marker="o", ms=4, lw=1.5, label=label)


def _draw_batch(panel: Any, run: RunData, shade: str) -> None:
    _draw_column(panel, run, full_steps(run.steps), "global_batch", shade, drawstyle="steps-pre")
    old, new = column(run.decisions, "old_batch"), column(run.decisions, "new_batch")
    changed = np.isfinite(new) & (old != new)
    at = axes_of(run, run.decisions)["samples"]
    panel.plot(at[changed], new[changed], "o", color=shade, mfc="white", ms=5)
    panel.set_ylim(bottom=0)


def _draw_gain(panel: Any, runs: Sequence[RunData]) -> str:
    """The gain on an axis of its own, where one run is alone; returns what to add to the title."""
    if len(runs) > 1 or not np.isfinite(column(runs[0].steps, "gain")).any():
        return ""
    right = panel.twinx()
    _draw_column(right, runs[0], full_steps(runs[0].steps), "gain", "#777777", lw=1, linestyle=":")
    right.set_ylim(bottom=0)
    right.spines[["top"]].set_visible(False)
    return " (dotted, right: AdaScale gain)"


def _draw_noise(panel: Any, run: RunData, shade: str) -> None:
    values = column(run.steps, "noise_scale")
    at = axes_of(run, run.steps)["samples"]
    panel.plot(at, np.where(values > 0, values, np.nan), color=shade, lw=1.5)
    dashed = {"drawstyle": "steps-pre", "linestyle": "--", "lw": 1}
    _draw_column(panel, run, full_steps(run.steps), "global_batch", shade, **dashed)
    if len(values):
        panel.set_yscale("log")


def _draw_column(
    panel: Any, run: RunData, steps: pd.DataFrame, name: str, shade: str, **style: Any
) -> None:
    at = axes_of(run, steps)["samples"]
    panel.plot(at, column(steps, name), color=shade, **{"lw": 1.5, **style})


def _finish(panel: Any, title: str, unit: str) -> None:
    panel.set_title(title, loc="left", fontsize=11)
    panel.set_ylabel(unit)
    panel.grid(color="#ececec")
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
