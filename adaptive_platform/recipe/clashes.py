"""Choices of a recipe that are right alone and make no sense together: what, why, the way out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from adaptive_platform.controllers.lr_rules import LegwConfig, LrRuleConfig
from adaptive_platform.optimizers.cyclic_tail import CyclicTailSchedule
from adaptive_platform.progress import Unit
from adaptive_platform.sync.local_sgd import LocalSgdConfig

if TYPE_CHECKING:
    from adaptive_platform.recipe.model import Recipe

__all__ = ["clashes"]


def clashes(recipe: Recipe) -> Iterator[str]:
    """One sentence per clash, with the way out; none where all goes together."""
    batch, rule, schedule = recipe.batch, recipe.lr_rule, recipe.schedule
    if recipe.membership.rebalance and recipe.model.normalization.together:
        yield (
            "membership.rebalance = true: batch norm over a group of workers wants equal shares; "
            "must be false, or choose another model.normalization."
        )
    if recipe.membership.rebalance and recipe.sync.lets_copies_differ:
        yield (
            f"membership.rebalance = true: with sync.kind = {recipe.sync.kind} each worker steps "
            "with its own share, so a smaller one would count as much; must be false."
        )
    if batch.kind == "smith":
        if rule.kind != "none":
            yield (
                f"lr_rule.kind = {rule.kind}: with batch.kind = smith the batch grows in the place "
                "of a decay, and a rule that raises the learning rate with it would undo that; "
                "must be none."
            )
        if schedule.kind != "constant":
            yield (
                f"schedule.kind = {schedule.kind}: with batch.kind = smith the batch grows in the "
                "place of a decay, so a schedule that decays as well would decay twice; must be "
                "constant (a warm-up may stay)."
            )
    if recipe.optimizer.assumes_cross_entropy and recipe.loss.label_smoothing:
        yield (
            f"loss.label_smoothing = {recipe.loss.label_smoothing:g}: optimizer.kind = "
            f"{recipe.optimizer.kind} knows the curvature of plain cross entropy only; must be 0."
        )
    if recipe.vr is not None and recipe.optimizer.needs_model:
        yield (
            f"vr: optimizer.kind = {recipe.optimizer.kind} preconditions with its own curvature; "
            "gradients reduced by GSNR go with a first-order optimizer, such as lars."
        )
    yield from _sync_clashes(recipe)
    if recipe.statistics.preconditioned and not recipe.optimizer.keeps_squares:
        yield (
            f"statistics.preconditioned = true: optimizer.kind = {recipe.optimizer.kind} keeps no "
            "average of squared gradients to measure noise through; must be false or left away, or "
            "use adamw or lamb."
        )
    if isinstance(rule, LegwConfig):
        warmup = schedule.warmup
        matches = warmup.unit is not Unit.EPOCHS or warmup.value == rule.warmup_epochs
        if warmup.value == 0 or not matches:
            yield (
                f"lr_rule.warmup_epochs = {rule.warmup_epochs:g}: legw lengthens the schedule's "
                f"own linear warm-up, and schedule.warmup = {warmup}; make the two equal."
            )
    if recipe.momentum_schedule is not None and not recipe.optimizer.chosen_momentum:
        yield (
            f"momentum_schedule: optimizer.kind = {recipe.optimizer.kind} has no momentum here; "
            "set one above 0, or leave the schedule out."
        )
    if recipe.weight_decay_schedule is not None and not recipe.optimizer.weight_decay:
        yield (
            "weight_decay_schedule: optimizer.weight_decay = 0, of which any share is 0; set one "
            "above 0, or leave the schedule out."
        )
    if recipe.ensemble and not isinstance(schedule, CyclicTailSchedule):
        yield (
            f"ensemble = true: its members are the ends of a schedule's cycles, and schedule.kind "
            f"= {schedule.kind} has none; must be cyclic_tail, or set ensemble to false."
        )
    if recipe.ensemble and recipe.averaging is not None:
        yield "averaging: with ensemble = true the snapshots are scored; leave one of the two out."
    if recipe.sync.lets_copies_differ and (recipe.ensemble or recipe.averaging is not None):
        name = "ensemble" if recipe.ensemble else "averaging"
        yield (
            f"{name}: it follows weights that are alike on all workers, and sync.kind = "
            f"{recipe.sync.kind} lets them differ; must be every_step, or leave it out."
        )
    if recipe.reducer.sparse is not None:
        yield from _sparse_clashes(recipe)
    momentum = recipe.momentum_rule
    if momentum.kind != "keep":
        optimizer = recipe.optimizer
        if not optimizer.chosen_momentum:
            yield (
                f"momentum_rule.kind = {momentum.kind}: optimizer.kind = {optimizer.kind} has no "
                "momentum here; set one above 0, or momentum_rule.kind to keep."
            )
        if momentum.kind == "correct" and not optimizer.lr_in_buffer:
            yield (
                f"momentum_rule.kind = correct: the buffer of optimizer.kind = {optimizer.kind} "
                "holds no learning rates that could be corrected; must be keep or hold_noise, or "
                "use optimizer.kind = lars with form = paper."
            )


def _sync_clashes(recipe: Recipe) -> Iterator[str]:
    sync = recipe.sync
    if not sync.lets_copies_differ:
        return
    why = f"sync.kind = {sync.kind}: workers step with the gradients of their own samples"
    if recipe.optimizer.needs_model:
        yield (
            f"{why}, but optimizer.kind = {recipe.optimizer.kind} shares its curvature between "
            "workers in every step; must be a first-order optimizer, or sync.kind every_step."
        )
    if recipe.vr is not None:
        yield (
            f"{why}, so vr has no variance over workers to reduce them by; must be left out, or "
            "sync.kind every_step."
        )
    starts_later = isinstance(sync, LocalSgdConfig) and sync.start.value > 0
    if recipe.batch.needs & {"noise", "layers"} and not starts_later:
        yield (
            f"{why}, so the noise that batch.kind = {recipe.batch.kind} reads is not measured; "
            "must be fixed or schedule, or sync.kind local_sgd with a later start."
        )
    rule = recipe.lr_rule
    if _rests_on_gain(rule) and not starts_later:
        yield (
            f"{why}, so the gain that lr_rule.kind = {rule.kind} with clock = {rule.clock} counts "
            "by is not measured; use none, linear, sqrt or legw with lr_rule.clock = samples, or "
            "sync.kind local_sgd with a later start."
        )


def _rests_on_gain(rule: LrRuleConfig) -> bool:
    return rule.kind == "adascale" or rule.clock == "scale_invariant"


def _sparse_clashes(recipe: Recipe) -> Iterator[str]:
    """What does not go together with gradients that travel sparsely."""
    optimizer, batch, rule = recipe.optimizer, recipe.batch, recipe.lr_rule
    wire = recipe.reducer.wire_dtype
    if optimizer.kind not in ("sgd", "lars") or optimizer.chosen_momentum:
        yield (
            f"optimizer.kind = {optimizer.kind}: with reducer.sparse momentum is applied before "
            "anything travels; must be sgd or lars with momentum = 0, and reducer.sparse.momentum "
            "in its place."
        )
    if {"noise", "layers"} & batch.needs or _rests_on_gain(rule):
        yield (
            f"reducer.sparse: batch.kind = {batch.kind} and lr_rule.kind = {rule.kind} with clock "
            f"= {rule.clock} need measured noise, which a sum with holes does not give; use "
            "batch.kind fixed or schedule, and lr_rule.kind none, linear, sqrt or legw with clock "
            "= samples."
        )
    for name, value in (("vr", recipe.vr), ("clip_norm", recipe.clip_norm), ("wire_dtype", wire)):
        if value is not None:
            yield f"{name}: does not go together with reducer.sparse; leave one of the two away."
    if recipe.sync.kind != "every_step":
        yield (
            f"sync.kind = {recipe.sync.kind}: reducer.sparse is for gradients that are summed in "
            "every step; must be every_step."
        )
    if recipe.precision.first_scale().value != 1.0:
        yield (
            "precision: what waits for later steps can't follow a loss scale that moves; with "
            "reducer.sparse train in float32 or bfloat16."
        )
