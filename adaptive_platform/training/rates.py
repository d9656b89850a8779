"""Learning rate and momentum of a step: schedule, rules and controller, multiplied in one place."""

from __future__ import annotations

from torch.optim import Optimizer

from adaptive_platform.controllers import MomentumContext
from adaptive_platform.optimizers import set_lr, set_momentum, set_progress
from adaptive_platform.recipe import Recipe
from adaptive_platform.summary import GradientSummary
from adaptive_platform.training.cadence import schedule_time
from adaptive_platform.training.state import RunState

__all__ = ["Rates"]


class Rates:
    """Sets what moves in the optimizer, from values that every worker knows.

    Args:
        recipe: Schedule, rules, and the values chosen for the base batch.
        optimizer: What is set.
        state: The run; its previous learning rate is kept for momentum correction.
    """

    def __init__(self, recipe: Recipe, optimizer: Optimizer, state: RunState) -> None:
        self._recipe = recipe
        self._rule = recipe.lr_rule.chosen(for_betas=recipe.optimizer.keeps_squares)
        self._optimizer = optimizer
        self._state = state

    @property
    def base_batch(self) -> int:
        """The batch that learning rate, gain and scale-invariant steps refer to."""
        return self._recipe.lr_rule.base_batch or self._state.base_batch

    def schedule_time(self) -> float:
        """Where the schedule stands, in the unit of the run's length."""
        recipe = self._recipe
        unit = recipe.stop.horizon.unit
        return schedule_time(self._state.progress, unit, recipe.lr_rule.clock, self.base_batch)

    def advance(self, gain: float) -> float:
        """Scale-invariant length of a step of that gain, in steps of the base batch."""
        return self._rule.advance(gain)

    def apply(self, batch: int, summary: GradientSummary) -> float:
        """Set learning rate and momentum for a step of `batch` samples; returns the former.

        Args:
            batch: Samples that entered the gradient, over all workers.
            summary: What is known of the gradients' noise, this step's included.
        """
        recipe, state = self._recipe, self._state
        rule = self._rule.factor(batch, self.base_batch, summary, state.progress)
        factor = rule * state.controller.lr_factor
        scheduled = recipe.schedule.factor(self.schedule_time(), recipe.stop.horizon.value)
        lr = recipe.optimizer.lr * factor * scheduled
        set_lr(self._optimizer, lr)
        set_progress(self._optimizer, state.progress.epochs)
        if recipe.momentum_rule.kind != "keep":
            context = MomentumContext(
                batch=batch,
                base_batch=self.base_batch,
                lr_factor=factor,
                lr=lr,
                previous_lr=state.previous_lr,
                lr_in_buffer=recipe.optimizer.lr_in_buffer,
            )
            chosen = recipe.optimizer.chosen_momentum
            assert chosen is not None  # the recipe refuses a rule without a momentum
            set_momentum(self._optimizer, recipe.momentum_rule.momentum(chosen, context))
        state.previous_lr = lr
        return lr
