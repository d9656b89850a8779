"""A batch that follows a list of stages (Mikami et al. 2018, arXiv 1811.05233)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Literal

from pydantic import Field, field_validator

from adaptive_platform.controllers.controller import (
    Controller,
    ControllerConfig,
    Decision,
    Observation,
    settle,
)
from adaptive_platform.progress import Duration, Progress, Unit
from adaptive_platform.settings import Settings

__all__ = ["Schedule", "ScheduleConfig", "Stage", "reached"]


class Stage(Settings):
    """A batch and when it starts."""

    at: Duration
    """Training after which the stage begins, such as `30 epochs`."""
    batch: int = Field(ge=1)
    """Samples per optimizer step over all workers."""


class ScheduleConfig(ControllerConfig):
    """Train with `global_batch`, then with the batch of each stage in turn."""

    kind: Literal["schedule"] = "schedule"
    stages: tuple[Stage, ...] = Field(min_length=1)
    """Stages in the order of their start, all counted in one unit."""
    boundaries: Literal["epoch", "step"] = "epoch"
    """`epoch`: a stage begins with the first epoch that starts after its time, as published.
    `step`: it begins with the next step, also inside an epoch."""

    @field_validator("stages")
    @classmethod
    def _in_order(cls, stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
        if len({stage.at.unit for stage in stages}) > 1:
            raise ValueError("count every stage's `at` in the same unit")
        starts = [stage.at.value for stage in stages]
        if starts[0] <= 0 or any(a >= b for a, b in itertools.pairwise(starts)):
            raise ValueError("`at` must be above 0 and rise; the batch before is `global_batch`")
        return stages

    def build(self) -> Schedule:
        """The controller."""
        return Schedule(self)


def reached(at: Duration, progress: Progress) -> bool:
    """True when the position in the data has come to `at`.

    Epochs are counted by position, not by samples trained: a skipped step must not move a change
    that is meant for an epoch's end into the next epoch.
    """
    if at.unit is Unit.EPOCHS:
        return progress.epoch + progress.cursor / progress.dataset_size >= at.value
    return progress.elapsed(at.unit) >= at.value


class Schedule(Controller):
    """Looks the batch up; remembers only the epoch of its last look."""

    def __init__(self, config: ScheduleConfig) -> None:
        self._config = config
        self._epoch = 0

    def decide(self, observation: Observation) -> Decision:
        """See `Controller.decide`."""
        batch, progress = observation.global_batch, observation.progress
        if self._config.boundaries == "epoch" and progress.epoch == self._epoch:
            if not observation.limits.allows(batch):
                return settle(observation, batch, "the limits moved")
            return Decision(
                global_batch=batch,
                reason=f"batch stays {batch}: stages begin with an epoch",
                changed=False,
                considered=False,
            )
        self._epoch = progress.epoch
        wanted, stage = self._config.global_batch, 0
        for number, found in enumerate(self._config.stages, start=1):
            if not reached(found.at, progress):
                break
            wanted, stage = found.batch, number
        why = f"stage {stage}, from {self._config.stages[stage - 1].at}" if stage else "first stage"
        return settle(observation, wanted, why, inputs={"stage": stage, "wanted": wanted})

    def state_dict(self) -> dict[str, float | int]:
        """See `Controller.state_dict`."""
        return {"epoch": self._epoch}

    def load_state_dict(self, state: Mapping[str, float | int]) -> None:
        """See `Controller.load_state_dict`."""
        self._epoch = int(state["epoch"])
