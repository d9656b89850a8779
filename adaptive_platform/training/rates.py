"""Learning rate, momentum and weight decay of a step: schedules, rules, controller."""

from __future__ import annotations

from dataclasses import dataclass

from torch.optim import Optimizer

from adaptive_platform.controllers import MomentumContext
from adaptive_platform.optimizers import set_lr, set_momentum, set_progress, set_weight_decay
from adaptive_platform.progress import Progress
from adaptive_platform.recipe import Recipe
from adaptive_platform.summary import GradientSummary
from adaptive_platform.training.cadence import schedule_time
from adaptive_platform.training.state import RunState

__all__ = ["Rates", "StepRates", "rates_at"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRates:
    """What moves in the optimizer from step to step."""

    lr: float
    """Learning rate of groups without a factor of their own."""
    momentum: float | None
    """Momentum, or first beta; None where the recipe leaves the optimizer's own alone."""
    weight_decay: float | None
    """Decay of parameters that are not excluded; None likewise."""


def rates_at(
    recipe: Recipe,
    time: float,
    batch: int,
    *,
    base_batch: int,
    controller_factor: float,
    summary: GradientSummary,
    progress: Progress,
    previous_lr: float,
) -> StepRates:
    """The rates of one step; a pure function of what every worker knows.

    Args:
        recipe: Schedules, rules, and the values chosen for the base batch.
        time: Where schedules stand, in the unit of the run's length.
        batch: Samples that entered the gradient, over all workers.
        base_batch: The batch that learning rate and momentum were chosen for.
        controller_factor: The batch controller's factor on the learning rate.
        summary: What is known of the gradients' noise, this step's included.
        progress: Where the run stands before the step.
        previous_lr: Learning rate of the last committed step; 0 before the first.
    """
    horizon = recipe.stop.horizon.value
    rule = recipe.lr_rule.chosen(for_betas=recipe.optimizer.keeps_squares)
    factor = rule.factor(batch, base_batch, summary, progress) * controller_factor
    lr = recipe.optimizer.lr * factor * recipe.schedule.factor(time, horizon)
    momentum = decay = None
    if recipe.momentum_rule.kind != "keep" or recipe.momentum_schedule is not None:
        chosen = recipe.optimizer.chosen_momentum
        assert chosen is not None  # the recipe refuses both without a momentum
        if recipe.momentum_schedule is not None:
            chosen *= recipe.momentum_schedule.factor(time, horizon)
        context = MomentumContext(
            batch=batch,
            base_batch=base_batch,
            lr_factor=factor,
            lr=lr,
            previous_lr=previous_lr,
            lr_in_buffer=recipe.optimizer.lr_in_buffer,
        )
        momentum = recipe.momentum_rule.momentum(chosen, context)
    if recipe.weight_decay_schedule is not None:
        decay = recipe.optimizer.weight_decay * recipe.weight_decay_schedule.factor(time, horizon)
    return StepRates(lr=lr, momentum=momentum, weight_decay=decay)


class Rates:
    """Sets what moves in the optimizer.

    Args:
        recipe: Schedules, rules, and the values chosen for the base batch.
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
        """Where schedules stand, in the unit of the run's length."""
        recipe = self._recipe
        unit = recipe.stop.horizon.unit
        return schedule_time(self._state.progress, unit, recipe.lr_rule.clock, self.base_batch)

    def advance(self, gain: float) -> float:
        """Scale-invariant length of a step of that gain, in steps of the base batch."""
        return self._rule.advance(gain)

    def apply(self, batch: int, summary: GradientSummary) -> float:
        """Set everything for a step of `batch` samples; returns the learning rate.

        Args:
            batch: Samples that entered the gradient, over all workers.
            summary: What is known of the gradients' noise, this step's included.
        """
        state = self._state
        rates = rates_at(
            self._recipe,
            self.schedule_time(),
            batch,
            base_batch=self.base_batch,
            controller_factor=state.controller.lr_factor,
            summary=summary,
            progress=state.progress,
            previous_lr=state.previous_lr,
        )
        set_lr(self._optimizer, rates.lr)
        set_progress(self._optimizer, state.progress.epochs)
        if rates.momentum is not None:
            set_momentum(self._optimizer, rates.momentum)
        if rates.weight_decay is not None:
            set_weight_decay(self._optimizer, rates.weight_decay)
        state.previous_lr = rates.lr
        return rates.lr
