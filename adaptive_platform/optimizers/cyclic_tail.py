"""A decaying schedule whose last part is a row of cycles: snapshots for a collapsed ensemble."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from adaptive_platform.optimizers.schedules import ScheduleConfig

__all__ = ["CyclicTailSchedule"]

_ROUNDING = 1e-9
"""Share of a cycle by which a new one may come early, so that rounding never makes it late."""


class CyclicTailSchedule(ScheduleConfig):
    """Polynomial decay aimed at the horizon, cut short by cycles that each decay to zero.

    Codreanu et al. 2017 (arXiv 1711.04291) train one network and average the probabilities of
    late snapshots. Their cycle counts could not be confirmed; the defaults, five cycles in the
    last 75 of 120 epochs, are a choice. Momentum is kept across cycles.
    """

    kind: Literal["cyclic_tail"] = "cyclic_tail"
    power: float = Field(default=2.0, gt=0)
    """Exponent of the base curve and of every cycle; > 0."""
    tail_start: float = Field(default=45 / 120, gt=0, lt=1)
    """Share of the horizon at which the cycles begin; in (0, 1)."""
    cycles: int = Field(default=5, ge=1)
    """Number of cycles, and of snapshots; >= 1."""
    restart: float = Field(default=1.0, gt=0, le=1)
    """Rate at the start of every cycle, as a share of the base curve where the cycles begin."""

    def curve(self, elapsed: float, horizon: float) -> float:
        """Base curve before the tail; in the tail, the cycle's own decay to zero."""
        start = self.tail_start * horizon
        if elapsed < start or horizon <= start:
            return float((1.0 - self.after_warmup(elapsed, horizon)) ** self.power)
        peak = self.restart * (1.0 - self.after_warmup(start, horizon)) ** self.power
        position = (elapsed - start) / (horizon - start) * self.cycles
        done = 1.0 if elapsed >= horizon else max(position - int(position + _ROUNDING), 0.0)
        return float(peak * (1.0 - done) ** self.power)

    def cycle_ends(self, horizon: float) -> list[float]:
        """Where to take the snapshots: the end of every cycle, the last one at the horizon."""
        start = self.tail_start * horizon
        length = (horizon - start) / self.cycles
        return [*(start + n * length for n in range(1, self.cycles)), horizon]
