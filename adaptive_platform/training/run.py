"""The loop around steps: what comes next, what the step meant, and what follows from it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from adaptive_platform.checkpoints.store import CheckpointStore
from adaptive_platform.collectives import Membership, Reducer
from adaptive_platform.controllers import Decision, Limits, Observation
from adaptive_platform.data import (
    BrokenLedger,
    BrokenSample,
    DataConfig,
    DataSource,
    MicroBatch,
    SampleStream,
    Share,
    next_slice,
)
from adaptive_platform.errors import DataError, RunFailedError, UserError
from adaptive_platform.gradients.buckets import GradientBuckets
from adaptive_platform.gradients.loss import SampleLoss, correct_predictions
from adaptive_platform.models import average_normalization, smallest_microbatch
from adaptive_platform.optimizers import set_lr, set_progress
from adaptive_platform.progress import Progress
from adaptive_platform.recipe import Recipe
from adaptive_platform.report.records import DecisionRecord, EvalRecord, EventRecord, StepRecord
from adaptive_platform.summary import GradientSummary
from adaptive_platform.training.cadence import crossed, is_over, schedule_time
from adaptive_platform.training.evaluation import evaluate, microbatch_to
from adaptive_platform.training.observer import Observer, SilentObserver
from adaptive_platform.training.persistence import Persistence
from adaptive_platform.training.state import RunState
from adaptive_platform.training.step import RIDER_SLOTS, Measured, Step
from adaptive_platform.training.unison import everyones, raise_first

__all__ = ["TrainingRun"]

_MIB = 2**20
_EVALUATION_BATCH = 256


class TrainingRun:
    """One worker's part of a run. Iterating yields micro-batches until the run is over.

        for batch in run:
            outputs = run.model(batch.inputs)
            run.backward(F.cross_entropy(outputs, batch.targets, reduction="none"), outputs)

    Every optimizer step, decision, evaluation and checkpoint happens inside the iteration, at the
    same point on every worker.

    Args:
        recipe: The configuration.
        model: Any module, on its device.
        source: Training and held-out samples.
        data_config: How `source` is read: transform, decode processes, broken samples.
        membership: The workers of this run.
        loss: Losses per sample for evaluation; the recipe's cross entropy where None.
        store: Checkpoints, read and written on rank 0 only; None for a run that keeps nothing.
        observer: Told of everything on rank 0; asked for stop requests everywhere.
        must_resume: Refuse to start afresh.

    Raises:
        UserError: The data is too small for the model, or a checkpoint does not fit; on every
            worker alike.
    """

    def __init__(
        self,
        recipe: Recipe,
        model: nn.Module,
        source: DataSource,
        data_config: DataConfig,
        membership: Membership,
        *,
        loss: SampleLoss | None = None,
        store: CheckpointStore | None = None,
        observer: Observer | None = None,
        must_resume: bool = False,
    ) -> None:
        self.recipe = recipe
        self.model = model
        self.source = source
        self.observer: Observer = observer or SilentObserver()
        self.interrupted = False
        """True when the run ended because it was asked to."""
        self._data_config = data_config
        self._loss = loss or recipe.loss.build_evaluation()
        self._device = next(model.parameters()).device
        self._memory_format = _memory_format(model)
        self._minimum = smallest_microbatch(model)
        _refuse_sparse(model)
        self._schedule = recipe.schedule
        self._base_batch = recipe.lr_rule.base_batch or recipe.batch.global_batch
        size = len(source.train)
        if size < self._minimum:
            raise DataError(
                f"data: {size} training sample; batch norm needs at least {self._minimum}."
            )
        self.state = RunState(
            progress=Progress(dataset_size=size),
            global_batch=recipe.batch.global_batch,
            loss_scale=recipe.precision.first_scale(),
            estimator=recipe.statistics.build(),
            controller=recipe.batch.build(),
            ledger=BrokenLedger(size, data_config.max_broken_share),
        )
        self._optimizer = recipe.optimizer.build(model.named_parameters())
        self._resources = ExitStack()
        self.reducer = Reducer(recipe.reducer, membership, self._device)
        self._resources.callback(self.reducer.close)
        self._buckets = GradientBuckets(
            model.named_parameters(),
            self.reducer.start,
            bucket_bytes=int(recipe.reducer.bucket_mib * _MIB),
            rider_slots=RIDER_SLOTS,
        )
        self._resources.callback(self._buckets.close)
        self._step = Step(model, self._optimizer, self._buckets, clip_norm=recipe.clip_norm)
        self._stream = SampleStream(
            source.train, data_config, recipe.seed, membership.rank, membership.world_size
        )
        self._resources.callback(self._stream.close)
        self._warned: set[str] = set()
        self._evaluated_at: Progress | None = None
        self._saved_at: Progress | None = None
        self._persistence = Persistence(
            store,
            recipe.checkpoint,
            model,
            self._optimizer,
            self.state,
            self.reducer,
            kinds={"batch": recipe.batch.kind, "optimizer": recipe.optimizer.kind},
            classes=source.classes,
            tell=self._event,
        )
        self._resources.callback(self._persistence.close)
        try:
            self._begin(must_resume)
        except BaseException:
            self.close()
            raise

    def _begin(self, must_resume: bool) -> None:
        if self.reducer.world_size > 1:
            self._event("note", f"gradients are summed by {self.reducer.plan.describe()}")
        if self._persistence.restore(must_resume=must_resume):
            self._evaluated_at = self._saved_at = self.progress
        else:
            start = self.recipe.batch.start(self._limits())
            self.state.global_batch = start.global_batch
            if start.changed:
                self._event("warning", start.reason)

    # --- what a loop uses -------------------------------------------------------------------

    @property
    def progress(self) -> Progress:
        """Where the run stands."""
        return self.state.progress

    @property
    def is_first(self) -> bool:
        """True on the worker that records and saves."""
        return self.reducer.rank == 0

    @property
    def finished(self) -> bool:
        """True when the run has its length, reached its target, or was asked to stop."""
        target = self.recipe.stop.target
        reached = target is not None and (self.state.accuracy or 0.0) >= target
        return (
            self.interrupted
            or reached
            or is_over(
                self.progress, self.recipe.stop.horizon, self.recipe.lr_rule.clock, self._base_batch
            )
        )

    @property
    def fraction_done(self) -> float:
        """Share of the run's length that lies behind, in [0, 1]."""
        return min(self._schedule_time() / self.recipe.stop.horizon.value, 1.0)

    def __iter__(self) -> Iterator[MicroBatch]:
        self.model.train()
        while not self.finished:
            yield from self._one_step()
        if not self.interrupted:
            self._finish()

    def backward(self, losses: Tensor, outputs: Tensor | None = None) -> None:
        """Back-propagate the micro-batch that the loop was given last.

        Args:
            losses: One loss per sample, shape (b,). The step sums them over all workers and
                divides by the true global batch, so no mean may be taken before.
            outputs: Class scores, for the training accuracy in the records; optional.

        Raises:
            UserError: `losses` is not one number per sample, or called twice.
        """
        targets = self._current.targets
        if losses.dim() == 1 and losses.shape[0] != targets.shape[0]:
            raise UserError(
                f"losses: {losses.shape[0]} losses for {targets.shape[0]} samples; give one each."
            )
        correct = correct_predictions(outputs, targets) if outputs is not None else None
        self._step.backward(losses, correct)

    def autocast(self) -> AbstractContextManager[Any]:
        """The recipe's number format, for forward and loss: `with run.autocast(): ...`."""
        return self.recipe.precision.autocast(self._device.type)

    def close(self) -> None:
        """Finish the checkpoint under way, end decode processes and process groups.

        The model stays as it is. Safe to call twice.
        """
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- one step ---------------------------------------------------------------------------

    def _one_step(self) -> Iterator[MicroBatch]:
        started = time.perf_counter()
        before = self.progress
        consumed = next_slice(
            before.cursor, self.state.global_batch, before.dataset_size, self._minimum
        )
        share, fatal = self._take(consumed)
        self._step.begin(
            global_batch=consumed,
            microbatches=len(share.microbatches) if share else 0,
            loss_scale=self.state.loss_scale.value,
            measure=self.state.estimator.due(before.step),
        )
        # Dropout and the like: a function of step and rank, so a resumed run draws the same.
        torch.manual_seed(hash((self.recipe.seed, before.step, self.reducer.rank)) & 0x7FFFFFFF)
        for microbatch in share.microbatches if share else ():
            self._current = microbatch_to(microbatch, self._device, self._memory_format)
            done = self._step.backward_done
            yield self._current
            if self._step.backward_done != done + 1:
                raise UserError(
                    "backward: call run.backward(losses) once for each micro-batch of the loop."
                )
        broken = share.broken if share else []
        measured = self._step.gather(
            stop_requested=self.observer.stop_requested(),
            broken=len(broken),
            fatal=fatal is not None,
        )
        if measured.fatal:
            raise_first(self.reducer, fatal)
        if measured.broken:
            self._account_for(broken, share)
        self._settle(measured, consumed, share, started)

    def _take(self, consumed: int) -> tuple[Share | None, Exception | None]:
        """This worker's share; an error is kept for the vote, so that all workers end together."""
        world = self.reducer.world_size
        try:
            return (
                self._stream.take(
                    self.progress.epoch,
                    self.progress.cursor,
                    consumed,
                    self._minimum,
                    self.recipe.microbatch or consumed,
                    # A single worker splits its batch, since noise shows only between parts.
                    at_least=2 if world == 1 else 1,
                ),
                None,
            )
        except (UserError, RunFailedError) as error:
            return None, error

    def _settle(
        self, measured: Measured, consumed: int, share: Share | None, started: float
    ) -> None:
        state, before = self.state, self.progress
        summary = state.estimator.summary()
        lr = gain = 0.0
        if measured.counts:
            if measured.moments is not None:
                state.estimator.update(measured.moments)
                summary = state.estimator.summary()
            factor = self.recipe.lr_rule.factor(measured.trained, self._base_batch, summary, before)
            horizon = self.recipe.stop.horizon
            lr = (
                self.recipe.optimizer.lr
                * factor
                * state.controller.lr_factor
                * self._schedule.factor(self._schedule_time(), horizon.value)
            )
            set_lr(self._optimizer, lr)
            set_progress(self._optimizer, before.epochs)
            self._step.commit(measured)
            gain = summary.gain(measured.trained, self._base_batch)
            state.progress = before.committed(consumed, measured.trained, gain)
            state.skipped_in_a_row = 0
        else:
            self._skip(measured, consumed)
        state.loss_scale = state.loss_scale.after(overflow=not measured.finite)
        record = self._step_record(measured, before, share, lr, gain, summary, started)
        if self.is_first:
            self.observer.step(record, self.fraction_done)
        if measured.counts:
            self._decide()
        self._after_step(before, stop=measured.stop_requests > 0)

    def _step_record(
        self,
        measured: Measured,
        before: Progress,
        share: Share | None,
        lr: float,
        gain: float,
        summary: GradientSummary,
        started: float,
    ) -> StepRecord:
        microbatches = share.microbatches if share else []
        sizes = [len(m) for m in microbatches]
        ids = None
        if self.recipe.report.record_sample_ids:
            mine = [i for m in microbatches for i in m.ids.tolist()]
            ids = self.reducer.all_gather_object(mine)
        seconds = time.perf_counter() - started
        return StepRecord(
            step=before.step + 1,
            epoch=before.epoch,
            samples_seen=self.progress.samples,
            scale_invariant_step=self.progress.scale_invariant_steps,
            world_size=self.reducer.world_size,
            global_batch=measured.trained,
            microbatch=max(sizes, default=0),
            accumulation=len(sizes),
            lr=lr,
            gain=gain,
            loss=measured.loss,
            accuracy=measured.accuracy,
            grad_sqnorm=measured.grad_sqnorm,
            noise_scale=summary.noise_scale,
            gsnr=summary.gsnr,
            efficiency=summary.efficiency(max(measured.trained, 1), self._base_batch),
            samples_per_second=measured.trained / seconds,
            step_seconds=seconds,
            data_seconds=share.wait_seconds if share else 0.0,
            reduce_seconds=measured.reduce_seconds,
            statistics_seconds=measured.statistics_seconds,
            skipped=not measured.counts,
            time=time.time(),
            sample_ids=ids,
        )

    def _skip(self, measured: Measured, consumed: int) -> None:
        state = self.state
        name = self._step.skip()
        state.progress = state.progress.skipped(consumed)
        if measured.trained == 0:
            return
        state.skipped_in_a_row += 1
        where = f"gradient of `{name}`" if name else "loss"
        self._event("skip", f"step dropped by all workers: non-finite {where}")
        if state.skipped_in_a_row >= self.recipe.precision.max_skipped_in_a_row:
            error = RunFailedError(
                f"{state.skipped_in_a_row} steps in a row were not finite; the first bad value is "
                f"in the {where}. Lower optimizer.lr, set clip_norm, or look at the data."
            )
            raise_first(self.reducer, error)

    def _decide(self) -> None:
        state = self.state
        summary = state.estimator.summary()
        decision = state.controller.decide(
            Observation(
                progress=self.progress,
                summary=summary,
                global_batch=state.global_batch,
                limits=self._limits(),
            )
        )
        blind = "noise" in self.recipe.batch.needs and not summary.observations
        if decision.considered and blind:
            self._warn_once(decision.reason)
        if self.is_first and decision.considered:
            self.observer.decision(self._decision_record(decision))
        state.global_batch = decision.global_batch

    def _limits(self) -> Limits:
        return Limits(
            dataset_size=self.progress.dataset_size,
            world_size=self.reducer.world_size,
            smallest_microbatch=self._minimum,
        )

    def _decision_record(self, decision: Decision) -> DecisionRecord:
        return DecisionRecord(
            step=self.progress.step,
            epoch=self.progress.epoch,
            samples_seen=self.progress.samples,
            kind=self.recipe.batch.kind,
            old_batch=self.state.global_batch,
            new_batch=decision.global_batch,
            reason=decision.reason,
            inputs=json.dumps(dict(decision.inputs)),
            candidates=json.dumps([asdict(c) for c in decision.candidates]),
            time=time.time(),
        )

    def _after_step(self, before: Progress, *, stop: bool) -> None:
        if stop:
            self.interrupted = True
            self._event("stop", "asked to stop: saving and leaving together")
            self.save()
            return
        self._persistence.poll()
        if crossed(self.recipe.report.evaluate_every, before, self.progress):
            self.evaluate()
        if crossed(self.recipe.checkpoint.every, before, self.progress):
            self.save()

    def _finish(self) -> None:
        if self._evaluated_at != self.progress:
            self.evaluate()
        if self._saved_at != self.progress:
            self.save()

    # --- evaluation and checkpoints -----------------------------------------------------------

    def evaluate(self) -> None:
        """Score the held-out set, where there is one. All workers take part."""
        self._evaluated_at = self.progress
        if self.source.eval is None:
            return
        average_normalization(self.model, self.reducer.all_reduce, weight=1.0)
        score = evaluate(
            self.model,
            self.source.eval,
            self._data_config,
            self._loss,
            self.reducer,
            precision=self.recipe.precision,
            device=self._device,
            memory_format=self._memory_format,
            batch=_EVALUATION_BATCH,
        )
        state = self.state
        state.accuracy, state.loss = score.accuracy, score.loss
        best = state.best_accuracy
        if score.accuracy is not None and (best is None or score.accuracy > best):
            state.best_accuracy, state.best_step = score.accuracy, self.progress.step
        if score.num_broken:
            self._report_broken("held-out", everyones(self.reducer, score.broken))
        if self.is_first:
            self.observer.evaluation(
                EvalRecord(
                    step=self.progress.step,
                    epoch=self.progress.epoch,
                    samples_seen=self.progress.samples,
                    loss=score.loss,
                    accuracy=score.accuracy,
                    samples=score.samples,
                    broken=score.num_broken,
                    seconds=score.seconds,
                    time=time.time(),
                )
            )

    def save(self) -> None:
        """Publish a checkpoint. All workers take part; storage trouble is told, not fatal."""
        self._saved_at = self.progress
        self._persistence.save()

    def _schedule_time(self) -> float:
        unit = self.recipe.stop.horizon.unit
        return schedule_time(self.progress, unit, self.recipe.lr_rule.clock, self._base_batch)

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            self._event("warning", text)

    def _event(self, kind: str, text: str) -> None:
        if self.is_first:
            self.observer.event(
                EventRecord(time=time.time(), step=self.progress.step, kind=kind, text=text)
            )

    def _account_for(self, broken: list[BrokenSample], share: Share | None) -> None:
        """Enter everyone's broken samples, and those that lost their micro-batch to them."""
        self._report_broken("training", self.state.ledger.record(everyones(self.reducer, broken)))
        left_out = everyones(self.reducer, share.left_out.tolist() if share else [])
        if left_out:
            self._event(
                "warning",
                f"{len(left_out)} readable sample(s) left out as well: broken ones left too few "
                "for a micro-batch",
            )

    def _report_broken(self, part: str, samples: Iterable[BrokenSample]) -> None:
        for sample in samples:
            if sample.where not in self._warned:
                self._warned.add(sample.where)
                self._event("broken_sample", f"left out of {part}: {sample}")


def _memory_format(model: nn.Module) -> torch.memory_format:
    """channels_last when the model's convolutions are laid out so."""
    for parameter in model.parameters():
        if parameter.dim() == 4 and parameter.shape[1] > 1:
            last = parameter.is_contiguous(memory_format=torch.channels_last)
            return torch.channels_last if last else torch.contiguous_format
    return torch.contiguous_format


def _refuse_sparse(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise UserError(
                f"model: `{name}.weight` has sparse gradients, which can't be reduced together "
                "with the others. Build the embedding with sparse=False."
            )
