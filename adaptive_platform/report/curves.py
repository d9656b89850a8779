"""What the panels of the report draw of a run's steps: losses, batch, noise, and its decisions."""

from __future__ import annotations

from typing import Any

import numpy as np

from adaptive_platform.report.series import (
    axes_of,
    column,
    extremes,
    full_steps,
    smooth,
    staircase,
)
from adaptive_platform.report.traces import (
    Shown,
    beside,
    held_out,
    smoothed,
    smoothing,
    stroke,
    trace,
    wrapped,
)
from adaptive_platform.report.wording import count

__all__ = ["accuracy", "batch", "loss", "noise"]


def loss(shown: Shown) -> list[dict[str, Any]]:
    """Training loss, smoothed, held-out loss, and where the batch changed."""
    curves = smoothed(shown, "loss", "training", show=True) + held_out(shown, "loss")
    return curves + _decisions_on(shown, "loss")


def _decisions_on(shown: Shown, name: str) -> list[dict[str, Any]]:
    """Changes of the batch as marks on a smoothed curve, so that its bends can be told apart."""
    steps, changes = shown.run.steps, _changes(shown)
    values = column(steps, name)
    if not shown.alone or not len(changes) or np.isnan(values).all():
        return []
    averaged = smooth(values, smoothing(values))
    known = np.isfinite(averaged)
    height = np.interp(column(changes, "step"), column(steps, "step")[known], averaged[known])
    return [
        trace(
            shown, axes_of(shown.run, changes), height, np.arange(len(changes)), "batch changed",
            mode="markers", text=_told_changes(changes), hovertemplate=beside(shown),
            marker={"size": 8, "color": "white", "line": {"color": shown.colour, "width": 2}},
        )
    ]  # fmt: skip


def _changes(shown: Shown) -> Any:
    """The newest decisions that changed the batch."""
    decisions = shown.run.decisions
    old, new = column(decisions, "old_batch"), column(decisions, "new_batch")
    return decisions.iloc[np.flatnonzero((old != new) & np.isfinite(new))[-shown.points :]]


def _told_changes(changes: Any) -> list[str]:
    return [
        f"<b>{count(row.old_batch)} → {count(row.new_batch)}</b> at step {count(row.step)}"
        f"<br>{wrapped(row.reason)}"
        for row in changes.itertuples()
    ]


def accuracy(shown: Shown) -> list[dict[str, Any]]:
    """Training accuracy, smoothed, and held-out accuracy."""
    return smoothed(shown, "accuracy", "training", show=True) + held_out(shown, "accuracy")


def batch(shown: Shown) -> list[dict[str, Any]]:
    """The batch as a staircase, and the decisions that changed it."""
    steps = full_steps(shown.run.steps)
    values = column(steps, "global_batch")
    traces = [
        trace(
            shown, axes_of(shown.run, steps), values, staircase(values, shown.points), "",
            line=stroke(shown, shape="vh"), showlegend=not shown.alone,
        )
    ]  # fmt: skip
    changes = _changes(shown)
    if len(changes):
        traces.append(
            trace(
                shown, axes_of(shown.run, changes), column(changes, "new_batch"),
                np.arange(len(changes)), "decisions", mode="markers",
                text=_told_changes(changes), hovertemplate=beside(shown),
                marker={"size": 9, "color": "white", "line": {"color": shown.colour, "width": 2}},
                showlegend=shown.alone,
            )
        )  # fmt: skip
    return traces


def noise(shown: Shown) -> list[dict[str, Any]]:
    """The noise scale, and the batch in use."""
    steps = shown.run.steps
    values = column(steps, "noise_scale")
    values = np.where(values > 0, values, np.nan)
    if np.isnan(values).all():
        return []
    positions = axes_of(shown.run, steps)
    traces = [
        trace(
            shown, positions, values, extremes(values, shown.points), "noise scale",
            line=stroke(shown),
        )
    ]  # fmt: skip
    full = full_steps(steps)
    in_use = column(full, "global_batch")
    traces.append(
        trace(
            shown, axes_of(shown.run, full), in_use, staircase(in_use, shown.points),
            "batch in use",
            line={"color": shown.colour if not shown.alone else "#777777", "width": 1.5,
                  "dash": "dash", "shape": "vh"},
            showlegend=shown.alone,
        )
    )  # fmt: skip
    return traces
