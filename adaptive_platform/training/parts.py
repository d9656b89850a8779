"""Builds what a run is made of, from every room, and lets go of all of it when one part fails."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.optim import Optimizer

from adaptive_platform.collectives import Membership, Pending, Reducer
from adaptive_platform.controllers.worker_shares import WorkerShares
from adaptive_platform.data import (
    BrokenLedger,
    DataConfig,
    DataSource,
    EncodedImages,
    SampleStream,
    ShardedCache,
    Shelf,
)
from adaptive_platform.errors import DataError, UserError
from adaptive_platform.gradients.buckets import GradientBuckets
from adaptive_platform.gradients.buffers import SharedBuffers
from adaptive_platform.gradients.loss import SampleLoss
from adaptive_platform.models import NormalizationPolicy, smallest_microbatch
from adaptive_platform.optimizers import AdamPreconditioner, Exchange, ListeningOptimizer
from adaptive_platform.optimizers.cyclic_tail import CyclicTailSchedule
from adaptive_platform.progress import Progress
from adaptive_platform.recipe import Recipe
from adaptive_platform.statistics import Stragglers
from adaptive_platform.training.checkpoint_writer import CheckpointWriter
from adaptive_platform.training.copies import Copies
from adaptive_platform.training.curvature import Curvature
from adaptive_platform.training.evaluated import Evaluated
from adaptive_platform.training.fitness import memory_format_of, refuse_sparse
from adaptive_platform.training.measured import RIDER_SLOTS
from adaptive_platform.training.measuring import Measuring
from adaptive_platform.training.mixing import EveryMixing, Mixing
from adaptive_platform.training.observer import Observer
from adaptive_platform.training.own_parts import OwnPart
from adaptive_platform.training.own_share import OwnShare
from adaptive_platform.training.persistence import Persistence
from adaptive_platform.training.rates import Rates
from adaptive_platform.training.ratios import Ratios, ReducerHalves
from adaptive_platform.training.scoring import Scoring
from adaptive_platform.training.sparse_exchange import SparseExchange
from adaptive_platform.training.state import RunState
from adaptive_platform.training.step import Step
from adaptive_platform.training.subgroups import Subgroups
from adaptive_platform.training.telling import Teller

__all__ = ["Lasting", "Parts", "assemble"]

_MIB = 2**20


@dataclass(slots=True, kw_only=True)
class Lasting:
    """What a worker keeps when its peers change."""

    writer: CheckpointWriter | None
    state: RunState | None = None
    optimizer: Optimizer | None = None
    mixing: Mixing | None = None
    evaluated: Evaluated | None = None
    shelf: Shelf = field(default_factory=lambda: Shelf(0))
    """Encoded images that this worker holds in memory."""
    told: set[str] = field(default_factory=set)
    """Warnings that were told, and are not told twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of one worker's run, wired to each other."""

    state: RunState
    reducer: Reducer
    subgroups: Subgroups
    optimizer: Optimizer
    buckets: GradientBuckets
    step: Step
    ratios: Ratios | None
    rates: Rates
    tell: Teller
    share: OwnShare
    stragglers: Stragglers
    measuring: Measuring
    scoring: Scoring
    persistence: Persistence
    copies: Copies
    evaluated: Evaluated
    mixing: Mixing
    minimum: int
    """Fewest samples of a step that the model can train on."""
    memory_format: torch.memory_format
    """Layout of 4-D inputs."""
    resources: ExitStack
    """Closes everything, last made first."""

    @property
    def is_first(self) -> bool:
        """True on the worker that records and saves."""
        return self.reducer.rank == 0


def assemble(
    recipe: Recipe,
    model: nn.Module,
    source: DataSource,
    data_config: DataConfig,
    membership: Membership,
    *,
    loss: SampleLoss | None,
    observer: Observer,
    lasting: Lasting,
    join_seconds: float,
    roll_call: bool,
) -> Parts:
    """Build the parts around a model, for one membership; arguments as for `TrainingRun`.

    Args:
        recipe: The configuration.
        model: Any module, on its device.
        source: Training and held-out samples.
        data_config: How `source` is read.
        membership: The workers.
        loss: Losses per sample for evaluation; the recipe's where None.
        observer: Told of everything.
        lasting: What an earlier membership left; filled in where it left nothing.
        join_seconds: Longest time until all workers are connected.
        roll_call: After a failure, find out who is lost.

    Raises:
        CollectiveError: A worker did not come in time, or was lost meanwhile.
        UserError: Model, data and recipe do not go together; nothing is left open.
    """
    if loss is not None and recipe.optimizer.assumes_cross_entropy:
        raise UserError(
            f"optimizer.kind = {recipe.optimizer.kind}: it knows the curvature of plain cross "
            "entropy only. Leave your own loss away, or choose another optimizer."
        )
    refuse_sparse(model)
    evaluation_loss = loss or recipe.loss.build_evaluation()
    memory_format = memory_format_of(model)
    policy = recipe.model.normalization
    smallest = _smallest_share(model, policy, membership.world_size)
    minimum = smallest * membership.world_size if policy.together else smallest
    state = lasting.state or _first_state(recipe, len(source.train), minimum, data_config)
    if state.shares is not None:
        state.shares.begin(membership.world_size)
    with ExitStack() as resources:
        reducer = Reducer(
            recipe.reducer,
            membership,
            _device_of(model),
            join_seconds=join_seconds,
            roll_call=roll_call,
        )
        resources.callback(reducer.close)
        subgroups = Subgroups(membership, reducer.device, recipe.reducer.timeout_seconds, resources)
        mixing = lasting.mixing or Mixing(
            recipe.mixup, recipe.erasing, len(source.classes), recipe.seed
        )
        evaluated = lasting.evaluated or Evaluated(
            model,
            # A copy, so before anything is hooked to the model.
            recipe.averaging.build(model) if recipe.averaging is not None else None,
            _cycle_ends(recipe),
        )
        if lasting.optimizer is None:
            policy.apply(
                model,
                membership.rank,
                membership.world_size,
                lambda ranks: subgroups.among(ranks).all_reduce,
            )
        optimizer = lasting.optimizer or recipe.optimizer.build_for(
            model,
            Exchange(
                reducer.rank,
                reducer.world_size,
                reducer.all_reduce,
                reducer.broadcast,
                reducer.all_gather,
                subgroups.exchange,
            ),
        )
        lasting.state, lasting.optimizer = state, optimizer
        lasting.mixing, lasting.evaluated = mixing, evaluated
        if isinstance(optimizer, ListeningOptimizer):
            resources.callback(optimizer.close)
        preconditioner = None
        if _through_preconditioner(recipe):
            preconditioner = AdamPreconditioner(optimizer)
        buffers = SharedBuffers(model, shared=membership.world_size > 1)
        sparse = None
        if recipe.reducer.sparse is not None:
            sparse = SparseExchange(recipe.reducer.sparse, reducer, lambda: state.progress.position)
        buckets = GradientBuckets(
            model.named_parameters(),
            reducer.start,
            bucket_bytes=int(recipe.reducer.bucket_mib * _MIB),
            rider_slots=RIDER_SLOTS + buffers.num_averaged + membership.world_size,
            layers=recipe.statistics.layers or "layers" in recipe.batch.needs,
            preconditioner=preconditioner,
            start_gradients=_narrowed(recipe, reducer),
            exchange=sparse,
            halves=ReducerHalves(reducer, recipe.reducer.wire) if state.variance else None,
        )
        resources.callback(buckets.close)
        tell = Teller(observer, state, first=reducer.rank == 0, told=lasting.told)
        ratios = None
        if state.variance is not None:
            ratios = Ratios(state.variance, buckets, reducer, tell, lambda: state.progress.step)
        train = source.train
        if data_config.cache_limit_mib and isinstance(train, EncodedImages):
            train = ShardedCache(
                train,
                data_config.cache_limit_mib,
                membership.rank,
                membership.world_size,
                reducer.all_gather_object,
                one_machine=len(set(membership.node_of_rank or ("one",))) == 1,
                shelf=lasting.shelf,
            )
            resources.callback(train.close)
            tell.event("note", train.describe())
        stream = SampleStream(
            train, data_config, recipe.seed, membership.rank, membership.world_size
        )
        share = OwnShare(
            stream,
            state,
            reducer,
            minimum=smallest,
            microbatch=recipe.microbatch,
            together=policy.together,
        )
        resources.callback(share.close)
        curvature = Curvature(
            model,
            source.train,
            data_config,
            evaluation_loss,
            reducer,
            seed=recipe.seed,
            memory_format=memory_format,
        )
        copies = Copies(
            recipe.sync, model, optimizer, reducer, membership, subgroups, seed=recipe.seed
        )
        own: dict[str, OwnPart] = {"sync": copies, "mixing": EveryMixing(mixing, reducer)}
        if sparse is not None:
            own["sparse"] = sparse
        if ratios is not None:
            own["variance"] = ratios
        persistence = Persistence(
            lasting.writer,
            recipe.checkpoint,
            model,
            optimizer,
            state,
            reducer,
            copies=copies,
            evaluated=evaluated,
            own=own,
            kinds={"batch": recipe.batch.kind, "optimizer": recipe.optimizer.kind},
            classes=source.classes,
            tell=tell.event,
        )
        return Parts(
            state=state,
            reducer=reducer,
            subgroups=subgroups,
            optimizer=optimizer,
            buckets=buckets,
            step=Step(
                optimizer,
                buckets,
                buffers,
                clip_norm=recipe.clip_norm,
                rank=membership.rank,
                world_size=membership.world_size,
                ratios=ratios,
            ),
            ratios=ratios,
            rates=Rates(recipe, optimizer, state),
            tell=tell,
            share=share,
            stragglers=Stragglers(),
            measuring=Measuring(
                recipe,
                state,
                membership,
                reducer,
                minimum=minimum,
                share=share,
                curvature=curvature,
                copies=copies,
                preconditioner=preconditioner,
            ),
            scoring=Scoring(
                model,
                evaluated,
                source,
                data_config,
                evaluation_loss,
                precision=recipe.precision,
                memory_format=memory_format,
                state=state,
                reducer=reducer,
                tell=tell,
                policy=policy,
                share=share,
            ),
            persistence=persistence,
            copies=copies,
            evaluated=evaluated,
            mixing=mixing,
            minimum=minimum,
            memory_format=memory_format,
            resources=resources.pop_all(),
        )


def _smallest_share(model: nn.Module, policy: NormalizationPolicy, world_size: int) -> int:
    """Fewest samples of a micro-batch."""
    if policy.together:
        return policy.smallest_share(world_size)
    return smallest_microbatch(model)


def _cycle_ends(recipe: Recipe) -> list[float]:
    schedule = recipe.schedule
    if not recipe.ensemble or not isinstance(schedule, CyclicTailSchedule):
        return []
    return schedule.cycle_ends(recipe.stop.horizon.value)


def _first_state(recipe: Recipe, size: int, minimum: int, data_config: DataConfig) -> RunState:
    if size < minimum:
        raise DataError(f"data: {size} training sample; batch norm needs at least {minimum}.")
    return RunState(
        progress=Progress(dataset_size=size),
        seed=recipe.seed,
        base_batch=recipe.lr_rule.base_batch or recipe.batch.global_batch,
        global_batch=recipe.batch.global_batch,
        loss_scale=recipe.precision.first_scale(),
        estimator=recipe.statistics.build(preconditioned=_through_preconditioner(recipe)),
        controller=recipe.batch.build(),
        shares=WorkerShares() if recipe.membership.rebalance else None,
        ledger=BrokenLedger(size, data_config.max_broken_share),
        variance=recipe.vr.build(for_betas=recipe.optimizer.keeps_squares) if recipe.vr else None,
    )


def _narrowed(recipe: Recipe, reducer: Reducer) -> Callable[[torch.Tensor], Pending] | None:
    """Sums in the recipe's narrower type; gradients that are as narrow already stay as they are."""
    wire = recipe.reducer.wire
    if wire is None:
        return None
    return lambda flat: reducer.start(flat, wire if flat.itemsize > wire.itemsize else None)


def _through_preconditioner(recipe: Recipe) -> bool:
    return recipe.optimizer.keeps_squares and recipe.statistics.preconditioned is not False


def _device_of(model: nn.Module) -> torch.device:
    for parameter in model.parameters():
        return parameter.device
    raise UserError("model: it has no parameter that requires a gradient.")
