"""What a recipe will do with learning rate, momentum, weight decay and batch, before it is run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from adaptive_platform.controllers import Limits, Observation
from adaptive_platform.progress import Progress, Unit
from adaptive_platform.recipe import Recipe
from adaptive_platform.summary import GradientSummary
from adaptive_platform.training.rates import rates_at

__all__ = ["PlannedRates", "RatePlan", "plan_rates"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRates:
    """One point of the run."""

    time: float
    """In the unit of the run's length."""
    batch: int
    lr: float
    momentum: float | None
    """None where the optimizer has none."""
    weight_decay: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RatePlan:
    """A recipe's rates over its length."""

    unit: str
    """What `time` counts."""
    points: tuple[PlannedRates, ...]
    notes: tuple[str, ...]
    """What can't be known before the run."""


def plan_rates(recipe: Recipe, points: int = 201, dataset_size: int = 50_000) -> RatePlan:
    """Walk through a run without data, model or workers.

    Batches follow schedules; those that are measured stay at their start, and a rule that needs
    measured noise counts as 1, which the notes say.

    Args:
        recipe: The run.
        points: Points at equal distances, start and end included; at least 2.
        dataset_size: Samples of an epoch, which turn epochs into steps where both are used.
    """
    horizon, base = recipe.stop.horizon, recipe.lr_rule.base_batch or recipe.batch.global_batch
    controller, batch = recipe.batch.build(), recipe.batch.global_batch
    summary, limits = GradientSummary(), Limits(dataset_size=dataset_size, world_size=1)
    measured = sorted(recipe.batch.needs)
    optimizer = recipe.optimizer
    found: list[PlannedRates] = []
    steps, before = 0.0, 0.0
    for number in range(points):
        time = horizon.value * number / (points - 1)
        gone = time - before
        steps += gone if horizon.unit is Unit.STEPS else gone * dataset_size / batch
        epochs = time if horizon.unit is Unit.EPOCHS else steps * batch / dataset_size
        before = time
        progress = Progress(
            dataset_size=dataset_size,
            epoch=int(epochs + 1e-9),
            cursor=min(round(max(epochs % 1, 0.0) * dataset_size), dataset_size - 1),
            step=round(steps),
            samples=round(epochs * dataset_size),
        )
        if not measured and number:
            observation = Observation(
                progress=progress, summary=summary, global_batch=batch, limits=limits
            )
            batch = controller.decide(observation).global_batch
        rates = rates_at(
            recipe,
            time,
            batch,
            base_batch=base,
            controller_factor=controller.lr_factor,
            summary=summary,
            progress=progress,
            previous_lr=found[-1].lr if found else 0.0,
        )
        kept = rates.momentum if rates.momentum is not None else optimizer.chosen_momentum
        decay = rates.weight_decay if rates.weight_decay is not None else optimizer.weight_decay
        found.append(
            PlannedRates(time=time, batch=batch, lr=rates.lr, momentum=kept, weight_decay=decay)
        )
    return RatePlan(
        unit=horizon.unit.value, points=tuple(found), notes=tuple(_notes(recipe, measured))
    )


def _notes(recipe: Recipe, measured: Sequence[str]) -> list[str]:
    notes = []
    if measured:
        notes.append(
            f"batch.kind = {recipe.batch.kind} decides from what it measures "
            f"({', '.join(measured)}); the batch is shown where it starts"
        )
    if recipe.lr_rule.kind == "adascale":
        notes.append(
            "lr_rule.kind = adascale multiplies by a measured gain between 1 and batch over base "
            "batch; shown for a gain of 1"
        )
    if recipe.lr_rule.clock == "scale_invariant":
        notes.append("time is scale-invariant: a step counts as its gain")
    if getattr(recipe.optimizer, "momentum_rule", "constant") != "constant":
        notes.append(
            f"optimizer.momentum_rule = {getattr(recipe.optimizer, 'momentum_rule', '')} lets "
            "momentum follow the learning rate inside the optimizer; not shown"
        )
    return notes
