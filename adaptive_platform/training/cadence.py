"""Pure answers to 'is it time?': for checkpoints, evaluations and the end of a run."""

from __future__ import annotations

import math
from typing import Literal

from adaptive_platform.progress import Duration, Progress, Unit

__all__ = ["crossed", "is_over", "schedule_time"]

Clock = Literal["samples", "scale_invariant"]


def crossed(every: Duration, before: Progress, after: Progress) -> bool:
    """True when a multiple of `every` lies in (before, after].

    Epochs are counted by position, so that `1 epochs` falls on the end of each pass over the data
    even where steps were skipped.
    """
    if every.value <= 0:
        return False
    return _count(every, after) > _count(every, before)


def schedule_time(progress: Progress, unit: Unit, clock: Clock, base_batch: int) -> float:
    """Where a schedule stands, in the unit of the run's length.

    With the scale-invariant clock a step counts as `gain` steps of the base batch, as AdaScale
    defines its progress (arXiv 2007.05105, algorithm 1).
    """
    if clock == "samples":
        return progress.elapsed(unit)
    if unit is Unit.EPOCHS:
        return progress.scale_invariant_steps * base_batch / progress.dataset_size
    return progress.scale_invariant_steps


def is_over(progress: Progress, horizon: Duration, clock: Clock, base_batch: int) -> bool:
    """True when the run has its length: passes over the data, steps, or their equivalents."""
    if clock == "samples" and horizon.unit is Unit.EPOCHS:
        return progress.position >= horizon.value
    # Gains are sums of floats: a millionth of a step must not buy another pass.
    reached = schedule_time(progress, horizon.unit, clock, base_batch)
    return reached >= horizon.value * (1.0 - 1e-9)


def _count(every: Duration, progress: Progress) -> int:
    if every.unit is Unit.EPOCHS:
        return math.floor(progress.position / every.value + 1e-9)
    return math.floor(progress.elapsed(every.unit) / every.value + 1e-9)
