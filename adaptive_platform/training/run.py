"""The loop around steps: what comes next, what the step meant, and what follows from it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from adaptive_platform.checkpoints.store import CheckpointStore
from adaptive_platform.collectives import Membership
from adaptive_platform.data import (
    DataConfig,
    DataSource,
    MicroBatch,
    Share,
    next_slice,
)
from adaptive_platform.errors import DataError, RunFailedError, UserError
from adaptive_platform.gradients.loss import SampleLoss, correct_predictions
from adaptive_platform.optimizers import ListeningOptimizer
from adaptive_platform.progress import Progress
from adaptive_platform.recipe import Recipe
from adaptive_platform.training.adversaries import with_adversaries
from adaptive_platform.training.cadence import crossed, is_over
from adaptive_platform.training.measuring import refuse_unmet_needs
from adaptive_platform.training.observer import Observer, SilentObserver
from adaptive_platform.training.parts import assemble
from adaptive_platform.training.recording import decision_record, step_record
from adaptive_platform.training.step import Measured
from adaptive_platform.training.unison import raise_first

__all__ = ["TrainingRun"]

_MIB = 2**20


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
        makes_adversaries: The loop trains on `with_adversaries`, which some controllers need.
        clock: Seconds, for the times of steps.

    Raises:
        UserError: The data is too small for the model, a checkpoint does not fit, or the
            controller needs what the loop does not supply; on every worker alike.
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
        makes_adversaries: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        refuse_unmet_needs(recipe, adversarial=makes_adversaries)
        self.recipe = recipe
        self.model = model
        self.source = source
        self.observer: Observer = observer or SilentObserver()
        self.interrupted = False
        """True when the run ended because it was asked to."""
        self._clock = clock
        parts = assemble(
            recipe,
            model,
            source,
            data_config,
            membership,
            loss=loss,
            store=store,
            observer=self.observer,
        )
        self.state = parts.state
        self.reducer = parts.reducer
        self._optimizer = parts.optimizer
        self._buckets = parts.buckets
        self._step = parts.step
        self._rates = parts.rates
        self._tell = parts.tell
        self._share = parts.share
        self._measuring = parts.measuring
        self._scoring = parts.scoring
        self._persistence = parts.persistence
        self._copies = parts.copies
        self._evaluated = parts.evaluated
        self._mixing = parts.mixing
        self._subgroups = parts.subgroups
        self._minimum = parts.minimum
        self._memory_format = parts.memory_format
        self._resources = parts.resources
        self._device = self.reducer.device
        self._out_of_memory = False
        self._saved_at: Progress | None = None
        try:
            self._begin(must_resume)
        except BaseException:
            self.close()
            raise

    def _begin(self, must_resume: bool) -> None:
        if self.reducer.world_size > 1:
            self._tell.event("note", f"gradients are summed by {self.reducer.describe()}")
        if isinstance(self._optimizer, ListeningOptimizer):
            self._tell.event("note", self._optimizer.describe())
        if self._persistence.restore(must_resume=must_resume):
            self._saved_at = self.progress
            allowed = self._measuring.limits().clamp(self.state.global_batch)
            if allowed[0] != self.state.global_batch:
                self.state.global_batch = allowed[0]
                self._tell.event("warning", f"batch goes on at {allowed[0]}: {allowed[1]}")
        else:
            start = self.recipe.batch.start(self._measuring.limits())
            self.state.global_batch = start.global_batch
            if start.changed:
                self._tell.event("warning", start.reason)

    # --- what a loop uses -------------------------------------------------------------------

    @property
    def progress(self) -> Progress:
        """Where the run stands."""
        return self.state.progress

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """What turns gradients into steps; to look at, the run drives it."""
        return self._optimizer

    @property
    def bytes_sent(self) -> int:
        """Bytes this worker put on the wire so far, those between some of the workers included."""
        return self.reducer.bytes_sent + self._subgroups.bytes_sent

    @property
    def is_first(self) -> bool:
        """True on the worker that records and saves."""
        return self.reducer.rank == 0

    @property
    def finished(self) -> bool:
        """True when the run has its length, reached its target, or was asked to stop."""
        target = self.recipe.stop.target
        reached = target is not None and (self.state.accuracy or 0.0) >= target
        return self.interrupted or reached or self._has_its_length

    @property
    def _has_its_length(self) -> bool:
        clock, horizon = self.recipe.lr_rule.clock, self.recipe.stop.horizon
        return is_over(self.progress, horizon, clock, self._rates.base_batch)

    @property
    def fraction_done(self) -> float:
        """Share of the run's length that lies behind, in [0, 1]."""
        return min(self._rates.schedule_time() / self.recipe.stop.horizon.value, 1.0)

    def __iter__(self) -> Iterator[MicroBatch]:
        self.model.train()
        begun = self.state.evaluated_at or Progress(dataset_size=self.progress.dataset_size)
        missed = self._evaluated.took_snapshot(self.progress.step) and begun != self.progress
        if missed or crossed(self.recipe.report.evaluate_every, begun, self.progress):
            self.evaluate()  # It was due when the run was stopped.
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
        with self.memory_guard():
            self._step.backward(losses, correct)

    @contextmanager
    def memory_guard(self) -> Iterator[None]:
        """Around forward and loss: lets the loop halve the micro-batch where memory runs out.

            for batch in run:
                with run.memory_guard():
                    outputs = run.model(batch.inputs)
                    run.backward(F.cross_entropy(outputs, batch.targets, reduction="none"), outputs)

        The step then starts anew on the same samples. `backward` alone is always guarded.
        """
        try:
            yield
        except torch.OutOfMemoryError as error:
            self.out_of_memory(error)

    def out_of_memory(self, error: torch.OutOfMemoryError) -> None:
        """Report that the micro-batch in hand did not fit, for loops that catch it themselves.

        Go on with the loop's next pass afterwards; keep neither the error nor any result, since
        they hold the memory that is short.
        """
        del error
        self._out_of_memory = True

    def with_adversaries(self, batch: MicroBatch, loss: SampleLoss) -> MicroBatch:
        """The micro-batch with the controller's share of adversarial examples (ABSA).

        Args:
            batch: As the loop yields it.
            loss: The training loss per sample.
        """
        share = self.state.controller.adversarial_fraction
        optimizer = self._optimizer
        with optimizer.paused() if isinstance(optimizer, ListeningOptimizer) else nullcontext():
            return with_adversaries(self.model, batch, loss, share, self.recipe.precision)

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
        started = self._clock()
        before = self.progress
        consumed = next_slice(
            before.cursor, self.state.global_batch, before.dataset_size, self._minimum
        )
        share, fatal = self._share.take(consumed)
        while True:
            yield from self._passes(consumed, share)
            broken = share.broken if share else []
            measured = self._step.gather(
                stop_requested=self.observer.stop_requested(),
                broken=len(broken),
                fatal=fatal is not None,
            )
            if measured.fatal:
                raise_first(self.reducer, fatal)
            if not measured.out_of_memory:
                break
            self._step.undo()
            share = self._share.smaller(share, consumed)
            self._tell.event(
                "memory",
                f"out of memory on {measured.out_of_memory} worker(s): micro-batches of at most "
                f"{self.state.memory_limit} samples from now on; the global batch stays",
            )
        if measured.broken:
            left_out = share.left_out.tolist() if share else []
            self._tell.left_out(self.reducer, broken, left_out)
        self._settle(measured, consumed, share, started)

    def _passes(self, consumed: int, share: Share | None) -> Iterator[MicroBatch]:
        """This worker's micro-batches, up to the first that memory does not hold."""
        step, variance = self.progress.step, self.state.variance
        summed = self._copies.strategy.sums_gradients(self.progress)
        self._out_of_memory = False
        self._step.begin(
            global_batch=consumed,
            microbatches=len(share.microbatches) if share else 0,
            loss_scale=self.state.loss_scale.value,
            # What sparse sums give is a velocity with holes, which says nothing about noise.
            measure=summed
            and self.recipe.reducer.sparse is None
            and self.state.estimator.due(step),
            squares=variance is not None and variance.due(step),
            alone=not summed,
        )
        # Dropout and the like: a function of step and rank, so a resumed run draws the same.
        # `torch.manual_seed` would format a stack trace for each accelerator that is not there.
        seed = hash((self.recipe.seed, step, self.reducer.rank)) & 0x7FFFFFFF
        torch.default_generator.manual_seed(seed)
        if self._device.type == "cuda":
            torch.cuda.manual_seed(seed)
        self._mixing.begin()
        for microbatch in share.microbatches if share else ():
            moved = microbatch.on(self._device, self._memory_format)
            self._current = self._mixing(moved, self.progress.epoch)
            done = self._step.backward_done
            yield self._current
            if self._out_of_memory:
                self._step.abandon()
                return
            if self._step.backward_done != done + 1:
                raise UserError(
                    "backward: call run.backward(losses) once for each micro-batch of the loop."
                )

    def _settle(
        self, measured: Measured, consumed: int, share: Share | None, started: float
    ) -> None:
        state, before = self.state, self.progress
        microbatches = share.microbatches if share else []
        lr = gain = 0.0
        if measured.counts:
            self._measuring.noise(measured, self._step, self._buckets)
            summary = state.summary()
            lr = self._rates.apply(measured.trained, summary)
            self._commit(measured)
            gain = summary.gain(measured.trained, self._rates.base_batch)
            state.progress = before.committed(consumed, measured.trained, self._rates.advance(gain))
            state.skipped_in_a_row = 0
            self._mixing.commit()
        else:
            self._skip(measured, consumed)
        state.loss_scale = state.loss_scale.after(overflow=not measured.finite)
        seconds = self._clock() - started
        if self.progress.epoch != before.epoch:
            self._measuring.curvature()
        ids = None
        if self.recipe.report.record_sample_ids:
            mine = [i for m in microbatches for i in m.ids.tolist()]
            ids = self.reducer.all_gather_object(mine)
        record = step_record(
            measured,
            before=before,
            after=self.progress,
            microbatches=microbatches,
            summary=state.summary(),
            lr=lr,
            gain=gain,
            base_batch=self._rates.base_batch,
            world_size=self.reducer.world_size,
            seconds=seconds,
            data_seconds=share.wait_seconds if share else 0.0,
            cache_mib=share.cached_bytes / _MIB if share else 0.0,
            sample_ids=ids,
        )
        if self.is_first:
            self.observer.step(record, self.fraction_done)
        if measured.counts:
            self._measuring.speed(record.microbatch, record.accumulation, record.step_seconds)
            self._decide()
        self._after_step(before, stop=measured.stop_requests > 0)

    def _commit(self, measured: Measured) -> None:
        strategy = self._copies.strategy
        alone = not strategy.sums_gradients(self.progress)
        if alone:
            strategy.before_step()
        self._step.commit(measured, reshape=self._measuring.reshaping(measured, self._step))
        if alone:
            strategy.after_step(self._step.own_samples)

    def _skip(self, measured: Measured, consumed: int) -> None:
        state = self.state
        name = self._step.skip()
        state.progress = state.progress.skipped(consumed)
        state.skipped_in_a_row += 1
        where = f"gradient of `{name}`" if name else "loss"
        why = f"non-finite {where}" if measured.trained else "none of its samples could be read"
        self._tell.event("skip", f"step dropped by all workers: {why}")
        if state.skipped_in_a_row < self.recipe.precision.max_skipped_in_a_row:
            return
        error: Exception = RunFailedError(
            f"{state.skipped_in_a_row} steps in a row were not finite; the first bad value is in "
            f"the {where}. Lower optimizer.lr, set clip_norm, or look at the data."
        )
        if not measured.trained:
            error = DataError(
                f"data: no sample of {state.skipped_in_a_row} steps in a row could be read, or "
                "too few for batch norm. Mend the data, or lower data.max_broken_share to stop "
                "sooner."
            )
        raise_first(self.reducer, error)

    def _decide(self) -> None:
        state, observation = self.state, self._measuring.observation()
        decision = state.controller.decide(observation)
        blind = "noise" in self.recipe.batch.needs and not observation.summary.observations
        if decision.considered and blind:
            self._tell.warn_once(decision.reason)
        if self.is_first and decision.considered:
            self.observer.decision(
                decision_record(
                    decision,
                    kind=self.recipe.batch.kind,
                    old_batch=state.global_batch,
                    progress=self.progress,
                    expected=self._measuring.forecast(decision, observation),
                )
            )
        state.global_batch = decision.global_batch

    def _after_step(self, before: Progress, *, stop: bool) -> None:
        cycle_ended = self.progress.step > before.step and self._evaluated.after_step(
            self.progress.step,
            self._rates.schedule_time(),
            1.0 if self._has_its_length else self.fraction_done,
            self._scoring.refresh,
        )
        if stop:
            self.interrupted = True
            self._tell.event("stop", "asked to stop: saving and leaving together")
            self.save()
            return
        self._persistence.poll()
        if cycle_ended or crossed(self.recipe.report.evaluate_every, before, self.progress):
            self.evaluate()
        best = self.recipe.checkpoint.keep_best and self.state.best_step == self.progress.step
        if best or crossed(self.recipe.checkpoint.every, before, self.progress):
            self.save()

    def _finish(self) -> None:
        if self.state.evaluated_at != self.progress:
            self.evaluate()
        if self._saved_at != self.progress:
            self.save()
        self._copies.strategy.settle()

    # --- evaluation and checkpoints -----------------------------------------------------------

    def evaluate(self) -> None:
        """Score the held-out set, where there is one. All workers take part."""
        self.state.evaluated_at = self.progress
        if self.source.eval is None:
            return
        with self._copies.agreed():
            self._scoring.score()

    def save(self) -> None:
        """Publish a checkpoint. All workers take part; storage trouble is told, not fatal."""
        self._saved_at = self.progress
        self._persistence.save()
