"""What all measuring controllers share: a pace, bounds, a growth limit and hysteresis."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import Field, field_validator, model_validator
from typing_extensions import Self

from adaptive_platform.controllers.controller import (
    Candidate,
    Controller,
    ControllerConfig,
    Decision,
    Limits,
    Observation,
    settle,
)
from adaptive_platform.progress import Duration, Unit

__all__ = ["AdaptiveConfig", "AdaptiveController", "Target", "require_data_unit"]


def require_data_unit(duration: Duration) -> Duration:
    """Refuse a length whose meaning moves with the batch.

    Raises:
        ValueError: Not counted in epochs or samples.
    """
    if duration.unit not in (Unit.EPOCHS, Unit.SAMPLES) or duration.value <= 0:
        raise ValueError("write a length above 0 in epochs or samples, such as `0.25 epochs`")
    return duration


class AdaptiveConfig(ControllerConfig):
    """A batch that follows a measurement."""

    min_batch: int | None = Field(default=None, ge=1)
    """Smallest global batch that may be chosen, in samples. None: what the workers need."""
    max_batch: int | None = Field(default=None, ge=1)
    """Largest global batch that may be chosen, in samples. None: the data set."""
    max_data_share: float = Field(default=1.0, gt=0.0, le=1.0)
    """Largest share of the data set that one batch may be; the literature keeps to a tenth."""
    decide_every: Duration = Duration(0.25)
    """Training from one decision to the next, in epochs or samples: steps would mean less and
    less often as the batch grows."""
    max_growth: float = Field(default=2.0, gt=1.0)
    """Largest factor by which one decision may raise the batch; one multiple is always allowed."""
    max_shrink: float = Field(default=0.5, gt=0.0, le=1.0)
    """Smallest factor by which one decision may lower the batch. 1: it never falls."""
    hysteresis: float = Field(default=0.15, ge=0.0, lt=1.0)
    """Share of the target by which the batch may miss it before anything changes."""
    min_observations: int = Field(default=10, ge=1)
    """Measured steps before the first change."""
    multiple_of: int = Field(default=1, ge=1)
    """Batches are rounded to a multiple of this many samples where the limits have room for one."""

    _check_decide_every = field_validator("decide_every")(require_data_unit)

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        low, high = self.min_batch or 1, self.max_batch or math.inf
        if not low <= self.global_batch <= high:
            raise ValueError(
                f"global_batch {self.global_batch} must lie between min_batch {low} and "
                f"max_batch {high}: move it or the bound"
            )
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The batch a measurement asks for, or why it asks for none."""

    batch: float | None
    """Wanted batch in samples, > 0, may be infinite. None: hold."""
    why: str
    inputs: Mapping[str, float | int | None] = field(default_factory=dict)
    candidates: tuple[Candidate, ...] = ()
    """Batches that were compared, where the target is the best of several."""


class AdaptiveController(Controller):
    """Steps towards a measured target, no further than the limits allow.

    Among the inputs of its decisions is what it predicts of the chosen batch, to be held against
    what came: learning per step and per sample, relative to the batch in force.
    """

    def __init__(self, config: AdaptiveConfig) -> None:
        self._config = config
        self._decided_at = 0

    @abstractmethod
    def target(self, observation: Observation) -> Target:
        """What the measurement asks for, before any limit."""

    def decide(self, observation: Observation) -> Decision:
        """See `Controller.decide`."""
        config, batch = self._config, observation.global_batch
        limits = self.bounds(observation)
        if not limits.allows(batch):
            return settle(observation, batch, "the limits moved", limits=limits)
        if not self._due(observation):
            return Decision(
                global_batch=batch,
                reason="not due",
                changed=False,
                considered=False,
            )
        self._decided_at = observation.progress.samples
        summary = observation.summary
        if summary.observations < config.min_observations:
            why = f"only {summary.observations} of {config.min_observations} observations, hold"
            if summary.observations == 0:
                why = "no noise estimate, which needs two micro-batches in a step, hold"
            return settle(observation, batch, why, limits=limits)
        target = self.target(observation)
        if target.batch is None:
            return settle(
                observation,
                batch,
                target.why,
                limits=limits,
                inputs=target.inputs,
                candidates=target.candidates,
            )
        return self._approach(observation, limits, target, target.batch)

    def bounds(self, observation: Observation) -> Limits:
        """The observation's limits and the controller's own."""
        config, limits = self._config, observation.limits
        high = config.max_batch
        if config.max_data_share < 1.0:
            share = max(int(config.max_data_share * limits.dataset_size), 1)
            high = share if high is None else min(high, share)
        if config.min_batch is None and high is None:
            return limits
        return limits.narrowed(config.min_batch, high)

    def _due(self, observation: Observation) -> bool:
        every = self._config.decide_every
        scale = observation.limits.dataset_size if every.unit is Unit.EPOCHS else 1
        return observation.progress.samples - self._decided_at >= every.value * scale

    def _approach(
        self, observation: Observation, limits: Limits, target: Target, wanted: float
    ) -> Decision:
        config, batch = self._config, observation.global_batch
        goal, stopped = limits.clamp(wanted, config.multiple_of)
        chosen, why = goal, target.why
        if abs(batch / goal - 1.0) <= config.hysteresis:
            chosen = batch
            why += f"; within {config.hysteresis:.0%} of {goal}"
        elif (paced := self._pace(batch, goal)) != goal:
            chosen = paced
            why += f"; no further in one decision, on the way to {goal}"
        if stopped:
            why += f"; {stopped}"
        candidates = (
            *target.candidates,
            Candidate(global_batch=batch, note="in force"),
            Candidate(global_batch=goal, note="target within limits"),
            Candidate(global_batch=chosen, note="after pace and hysteresis"),
        )
        inputs = {
            **target.inputs,
            "predicted_step_gain": observation.summary.gain(chosen, batch),
            "predicted_sample_gain": observation.summary.efficiency(chosen, batch),
        }
        return settle(observation, chosen, why, limits=limits, inputs=inputs, candidates=candidates)

    def _pace(self, batch: int, goal: int) -> int:
        """As far towards `goal` as one decision goes, in whole multiples, and at least one."""
        config, unit = self._config, self._config.multiple_of
        if goal > batch:
            furthest = math.floor(batch * config.max_growth / unit) * unit
            return min(goal, max(furthest, (batch // unit + 1) * unit))
        if config.max_shrink == 1.0:
            return batch
        furthest = math.ceil(batch * config.max_shrink / unit) * unit
        return max(goal, min(furthest, (batch - 1) // unit * unit))

    def state_dict(self) -> dict[str, float | int]:
        """See `Controller.state_dict`."""
        return {"decided_at": self._decided_at}

    def load_state_dict(self, state: Mapping[str, float | int]) -> None:
        """See `Controller.load_state_dict`."""
        self._decided_at = int(state["decided_at"])
