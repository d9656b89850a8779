"""What a change of the batch is expected to bring: the worth of a step, and its time."""

from __future__ import annotations

from dataclasses import dataclass

from adaptive_platform.controllers import Observation
from adaptive_platform.controllers.goodput import split_of
from adaptive_platform.summary import ThroughputModel

__all__ = ["Forecast", "forecast"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """A step at another batch, measured in steps at the batch in force."""

    gain: float | None
    """Its worth; None while noise is not known."""
    slowdown: float | None
    """Its time; None where no step was timed."""


def forecast(observation: Observation, batch: int, model: ThroughputModel | None) -> Forecast:
    """What a step of `batch` samples should bring, by the noise and the speed known now.

    The worth is the AdaScale gain over the batch in force (arXiv 2007.05105, eq. 5), so the base
    batch cancels out.

    Args:
        observation: What the controller was told.
        batch: What it chose.
        model: The speed of this run; None where nothing was timed.
    """
    summary, limits, before = observation.summary, observation.limits, observation.global_batch
    slowdown = None
    if model is not None:
        now = model.step_seconds(limits.world_size, limits.num_nodes, *split_of(before, limits))
        then = model.step_seconds(limits.world_size, limits.num_nodes, *split_of(batch, limits))
        slowdown = then / now if now > 0.0 else None
    return Forecast(gain=summary.gain(batch, before) if summary.usable else None, slowdown=slowdown)
