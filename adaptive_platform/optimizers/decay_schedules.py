"""Schedules that decay once: constant, polynomial, cosine, and SP-NGD's polynomial."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, field_validator
from pydantic_core.core_schema import ValidationInfo

from adaptive_platform.optimizers.schedules import ScheduleConfig

__all__ = ["ConstantSchedule", "CosineSchedule", "PolynomialSchedule", "SpNgdSchedule"]


class ConstantSchedule(ScheduleConfig):
    """The base rate throughout, after the warm-up."""

    kind: Literal["constant"] = "constant"

    def curve(self, elapsed: float, horizon: float) -> float:
        """Always 1."""
        return 1.0


class PolynomialSchedule(ScheduleConfig):
    """`end + (1 - end)(1 - x)^power`, x the share of the way from warm-up to horizon.

    Power 2 is the LARS papers' curve (arXiv 1708.03888, 1811.06992); with `end` it is the ratio
    of arXiv 1903.12650's authors.
    """

    kind: Literal["polynomial"] = "polynomial"
    power: float = Field(default=2.0, gt=0)
    """Exponent; > 0. 1 is a straight line."""
    end: float = Field(default=0.0, ge=0, le=1)
    """Factor at the horizon; in [0, 1]."""

    def curve(self, elapsed: float, horizon: float) -> float:
        """See the class."""
        left = 1.0 - self.after_warmup(elapsed, horizon)
        return float(self.end + (1.0 - self.end) * left**self.power)


class CosineSchedule(ScheduleConfig):
    """Half a cosine from 1 to `end` over the way from warm-up to horizon (arXiv 1608.03983)."""

    kind: Literal["cosine"] = "cosine"
    end: float = Field(default=0.0, ge=0, le=1)
    """Factor at the horizon; in [0, 1]."""

    def curve(self, elapsed: float, horizon: float) -> float:
        """See the class."""
        done = self.after_warmup(elapsed, horizon)
        return self.end + (1.0 - self.end) * 0.5 * (1.0 + math.cos(math.pi * done))


class SpNgdSchedule(ScheduleConfig):
    """Constant, then `(1 - (e - start)/(end - start))^power` (SP-NGD, arXiv 2002.06015).

    `end` lies beyond the horizon, so that the last rate is small but not zero. The defaults are
    the published row of batch 32,768: epochs 1.5 and 49.5 of 45.
    """

    kind: Literal["sp_ngd"] = "sp_ngd"
    start_fraction: float = Field(default=1.5 / 45, ge=0, lt=1)
    """Share of the horizon at which the decay starts; in [0, 1)."""
    end_fraction: float = Field(default=49.5 / 45, gt=0)
    """Share of the horizon at which the curve would reach zero; above `start_fraction`."""
    power: float = Field(default=3.5, gt=0)
    """Exponent; > 0. Published: 11 (batch 4,096) down to 2.9 (65,536)."""

    @field_validator("end_fraction")
    @classmethod
    def _after_start(cls, end: float, info: ValidationInfo) -> float:
        start = info.data.get("start_fraction", 0.0)
        if end <= start:
            raise ValueError(f"must lie after start_fraction = {start:g}")
        return end

    def curve(self, elapsed: float, horizon: float) -> float:
        """See the class."""
        start, end = self.start_fraction * horizon, self.end_fraction * horizon
        if elapsed < start or end <= start:
            return 1.0
        return float(max(1.0 - (elapsed - start) / (end - start), 0.0) ** self.power)
