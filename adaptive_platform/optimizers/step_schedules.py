"""Schedules that drop at given points: step decay and Akiba's slow start."""

from __future__ import annotations

from bisect import bisect_right
from typing import Annotated, Literal

from pydantic import Field, field_validator
from pydantic_core.core_schema import ValidationInfo

from adaptive_platform.optimizers.schedules import ScheduleConfig
from adaptive_platform.progress import Duration

__all__ = ["SlowStartSchedule", "StepSchedule"]

Fraction = Annotated[float, Field(gt=0, lt=1)]

_ROUNDING = 1e-9
"""Share of the horizon by which a drop may come early, so that rounding never makes it late."""


class StepSchedule(ScheduleConfig):
    """Multiply by `decay` at each milestone (Goyal et al. 2017, arXiv 1706.02677).

    The step that starts at a milestone is the first with the lower rate.
    """

    kind: Literal["step"] = "step"
    milestones: tuple[Duration, ...] | None = None
    """Where the rate drops, in the horizon's unit, such as `[30 epochs, 60 epochs]`. Null: see
    `fractions`."""
    fractions: tuple[Fraction, ...] | None = None
    """Where the rate drops, as shares of the horizon. Null, without milestones: 1/3, 2/3 and 8/9,
    the published 30, 60 and 80 of 90 epochs."""
    decay: float = Field(default=0.1, gt=0, lt=1)
    """Factor of one drop; in (0, 1)."""

    @field_validator("fractions")
    @classmethod
    def _one_of_two(
        cls, fractions: tuple[float, ...] | None, info: ValidationInfo
    ) -> tuple[float, ...] | None:
        if fractions is not None and info.data.get("milestones") is not None:
            raise ValueError("give milestones or fractions, not both; set one to null")
        return fractions

    def lengths(self) -> list[tuple[str, Duration]]:
        """The warm-up and every milestone."""
        return [*super().lengths(), *(("milestones", at) for at in self.milestones or ())]

    def curve(self, elapsed: float, horizon: float) -> float:
        """`decay` to the number of milestones passed."""
        if self.milestones is not None:
            points = [at.value for at in self.milestones]
        else:
            shares = self.fractions if self.fractions is not None else (1 / 3, 2 / 3, 8 / 9)
            points = [share * horizon for share in shares]
        return float(self.decay ** _passed(points, elapsed, horizon))


class SlowStartSchedule(ScheduleConfig):
    """A low rate for long (Akiba, Suzuki, Fukuda 2017, arXiv 1711.04325).

    Over 90 epochs: 0.5 of the linear rule's rate to epoch 40, 0.075 to 70, 0.01 to 85, 0.001.
    """

    kind: Literal["slow_start"] = "slow_start"
    factors: tuple[Annotated[float, Field(gt=0)], ...] = (0.5, 0.075, 0.01, 0.001)
    """The factor of each phase; > 0."""
    fractions: tuple[Fraction, ...] = (40 / 90, 70 / 90, 85 / 90)
    """Shares of the horizon at which the second and later phases begin, rising."""

    @field_validator("fractions")
    @classmethod
    def _between_factors(
        cls, fractions: tuple[float, ...], info: ValidationInfo
    ) -> tuple[float, ...]:
        phases = len(info.data.get("factors", ()))
        if phases and len(fractions) != phases - 1:
            raise ValueError(f"{phases} factors need {phases - 1} fractions, one between each two")
        if list(fractions) != sorted(fractions):
            raise ValueError("must rise")
        return fractions

    def curve(self, elapsed: float, horizon: float) -> float:
        """The factor of the phase that `elapsed` lies in."""
        points = [share * horizon for share in self.fractions]
        return self.factors[_passed(points, elapsed, horizon)]


def _passed(points: list[float], elapsed: float, horizon: float) -> int:
    return bisect_right(sorted(points), elapsed + _ROUNDING * horizon)
