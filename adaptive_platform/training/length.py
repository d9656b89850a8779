"""How far a run is on its way: the length its recipe gives it, and what ends it sooner."""

from __future__ import annotations

from adaptive_platform.recipe import Recipe
from adaptive_platform.training.cadence import is_over
from adaptive_platform.training.rates import Rates
from adaptive_platform.training.state import RunState

__all__ = ["Length"]


class Length:
    """Answers alike on every worker, from what is in the run's state.

    Args:
        recipe: Length and target.
        rates: Knows where schedules stand.
        state: What steers the run.
    """

    def __init__(self, recipe: Recipe, rates: Rates, state: RunState) -> None:
        self._recipe = recipe
        self._rates = rates
        self._state = state

    @property
    def reached(self) -> bool:
        """True when the run has its length."""
        clock, horizon = self._recipe.lr_rule.clock, self._recipe.stop.horizon
        return is_over(self._state.progress, horizon, clock, self._rates.base_batch)

    @property
    def finished(self) -> bool:
        """True when the run has its length, or is as accurate as it was asked to be."""
        target = self._recipe.stop.target
        enough = target is not None and (self._state.accuracy or 0.0) >= target
        return enough or self.reached

    @property
    def fraction_done(self) -> float:
        """Share of the length that lies behind, in [0, 1]."""
        return min(self._rates.schedule_time() / self._recipe.stop.horizon.value, 1.0)

    @property
    def share_done(self) -> float:
        """`fraction_done`, and exactly 1 at the end, whatever rounding does."""
        return 1.0 if self.reached else self.fraction_done
