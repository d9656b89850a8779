"""Small multiples of `bench recipes`: one panel per arm, all others in grey behind it."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from adaptive_platform.storage import open_location, write_bytes

__all__ = ["write_multiples"]

Curve = Sequence[Sequence[float]]
"""Points of steps, samples and accuracy in [0, 1]."""

_COLUMNS = 5
_LOWEST = 40.0
"""Of the accuracies in %: below it all arms are at their beginning."""


def write_multiples(curves: Mapping[str, Curve], path: Path, *, reference: str) -> None:
    """Draw accuracy over optimizer steps as a PNG.

    Args:
        curves: Mean curve of each arm that gets a panel, and of the reference.
        path: The file.
        reference: Arm that is dashed in every panel and has none of its own.
    """
    from matplotlib.figure import Figure

    arms = [arm for arm in curves if arm != reference]
    rows = -(-len(arms) // _COLUMNS)
    figure = Figure(figsize=(12, 1.75 * rows + 0.5), dpi=110, layout="constrained")
    panels = figure.subplots(rows, _COLUMNS, sharex=True, sharey=True, squeeze=False).ravel()
    for panel, arm in zip(panels, arms, strict=False):
        for other in arms:
            panel.plot(*_xy(curves[other]), color="#dddddd", lw=0.7, zorder=1)
        if reference in curves:
            panel.plot(*_xy(curves[reference]), color="#555555", lw=1.0, ls="--", zorder=2)
        panel.plot(*_xy(curves[arm]), color="#c2410c", lw=1.8, zorder=3)
        panel.set_title(arm, loc="left", fontsize=9)
        panel.set_xscale("log")
        panel.set_ylim(_LOWEST, 101.0)
        panel.tick_params(labelsize=7)
        panel.spines[["top", "right"]].set_visible(False)
    for panel in panels[len(arms) :]:
        panel.set_visible(False)
    figure.supxlabel("optimizer steps", fontsize=9)
    figure.supylabel("held-out accuracy in %, mean over seeds", fontsize=9)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    write_bytes(*open_location(path), buffer.getvalue())


def _xy(curve: Curve) -> tuple[list[float], list[float]]:
    return [point[0] for point in curve], [100.0 * point[2] for point in curve]
