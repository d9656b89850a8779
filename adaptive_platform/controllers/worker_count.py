"""How many workers a batch is worth: the most that each still bring a set share of one alone.

With the batch and its statistical efficiency given, goodput (Pollux, OSDI 2021, section 3) is
proportional to speed, so that K workers' efficiency is `T(1) / (K T(K))` by the fitted step times.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from adaptive_platform.controllers.controller import Limits
from adaptive_platform.controllers.goodput import split_of
from adaptive_platform.summary import ThroughputModel

__all__ = ["WorkerAdvice", "advise_workers"]

_REACH = 2
"""The fit is trusted up to this many times the workers that were timed, as in Pollux."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerAdvice:
    """A number of workers, and why."""

    workers: int
    reason: str
    """In one sentence for people."""
    efficiency: Mapping[int, float] = field(default_factory=dict)
    """Of each number that was weighed, in (0, 1] and more where a model is superlinear."""


def advise_workers(
    model: ThroughputModel,
    limits: Limits,
    *,
    global_batch: int,
    workers: tuple[int, int],
    min_efficiency: float,
) -> WorkerAdvice:
    """The largest number of workers whose efficiency is at least `min_efficiency`.

    Args:
        model: The fitted speed of the run.
        limits: Today's number of workers and nodes, and what bounds a micro-batch.
        global_batch: The batch in force, in samples.
        workers: Smallest and largest number that is allowed.
        min_efficiency: Goodput per worker over that of one worker alone, in [0, 1].
    """
    low, high = workers
    today = limits.world_size
    per_node = math.ceil(today / limits.num_nodes)
    most = max(low, min(high, _REACH * today, global_batch // limits.smallest_microbatch))
    alone = _seconds(1, 1, model, limits, global_batch)
    efficiency = {}
    for number in sorted({low, most, *range(low, most + 1)}):
        nodes = max(1, math.ceil(number / per_node))
        seconds = _seconds(number, nodes, model, limits, global_batch)
        efficiency[number] = alone / (number * seconds) if seconds > 0.0 else 1.0
    good = [number for number, share in efficiency.items() if share >= min_efficiency]
    chosen = max(good, default=low)
    reason = (
        f"{chosen} worker(s) for a batch of {global_batch}: each brings "
        f"{efficiency[chosen]:.0%} of what one alone does"
    )
    if chosen < most:
        reason += f"; with {chosen + 1} it would be {efficiency[chosen + 1]:.0%}"
    reason += f" (floor {min_efficiency:.0%}, fit within {model.fit_error:.0%})"
    return WorkerAdvice(workers=chosen, reason=reason, efficiency=efficiency)


def _seconds(
    workers: int, nodes: int, model: ThroughputModel, limits: Limits, global_batch: int
) -> float:
    at = replace(limits, world_size=workers, num_nodes=nodes)
    return model.step_seconds(workers, nodes, *split_of(global_batch, at))
