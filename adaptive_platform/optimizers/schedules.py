"""Learning-rate schedules: a multiplier of the base rate as a pure function of progress."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

from pydantic import Field, field_validator
from pydantic_core.core_schema import ValidationInfo

from adaptive_platform.progress import Duration
from adaptive_platform.settings import Variant

__all__ = ["ScheduleConfig"]


class ScheduleConfig(Variant, ABC):
    """A warm-up times a curve. No state: a resumed run gets the same rates from the same progress.

    `elapsed` and `horizon` are numbers in one unit, that of the run's horizon; where the batch
    moves, epochs, samples and scale-invariant steps keep their meaning and steps do not. A rate
    holds for the step that starts at `elapsed`; from the horizon on it stays at its end value.
    """

    warmup: Duration = Duration(0.0)
    """Length of the warm-up, in the horizon's unit, such as `5 epochs`; 0 for none."""
    warmup_start: float = Field(default=0.0, ge=0, le=1)
    """Factor at the start of the warm-up; in [0, 1]. Goyal et al. start a batch of k times the
    base batch at 1/k."""
    warmup_kind: Literal["linear", "exponential", "constant"] = "linear"
    """`linear` and `exponential` climb from `warmup_start` to 1 step by step; `constant` stays at
    `warmup_start` and then jumps."""

    @field_validator("warmup_kind")
    @classmethod
    def _start_above_zero(cls, kind: str, info: ValidationInfo) -> str:
        if kind != "linear" and info.data.get("warmup_start") == 0 and info.data["warmup"].value:
            raise ValueError("needs warmup_start > 0, since from 0 the rate would stay at 0")
        return kind

    def factor(self, elapsed: float, horizon: float) -> float:
        """Multiplier of the base learning rate; >= 0.

        Args:
            elapsed: Training done before the step.
            horizon: Training done at the end of the run, in the same unit.
        """
        elapsed = min(max(elapsed, 0.0), horizon)
        return self._ramp(elapsed) * self.curve(elapsed, horizon)

    def check(self, horizon: Duration) -> None:
        """Refuse lengths that are not counted in the horizon's unit.

        Raises:
            ValueError: Which field, its value, and the unit it must have.
        """
        for name, length in self.lengths():
            if length.value and length.unit is not horizon.unit:
                raise ValueError(
                    f"{name} = {length}: the run ends after {horizon}, so write it in "
                    f"{horizon.unit.value}"
                )

    def lengths(self) -> list[tuple[str, Duration]]:
        """Every length of the schedule with the name of its field."""
        return [("warmup", self.warmup)]

    @abstractmethod
    def curve(self, elapsed: float, horizon: float) -> float:
        """The schedule without its warm-up, for `elapsed` in [0, horizon]."""

    def after_warmup(self, elapsed: float, horizon: float) -> float:
        """Share of the way from the end of the warm-up to the horizon; in [0, 1]."""
        span = horizon - self.warmup.value
        return min(max((elapsed - self.warmup.value) / span, 0.0), 1.0) if span > 0 else 0.0

    def _ramp(self, elapsed: float) -> float:
        if elapsed >= self.warmup.value:
            return 1.0
        done, start = elapsed / self.warmup.value, self.warmup_start
        if self.warmup_kind == "linear":
            return start + (1.0 - start) * done
        if self.warmup_kind == "exponential":
            return float(start ** (1.0 - done))
        return start
