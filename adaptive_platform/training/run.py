"""The loop around steps: what comes next, what the step meant, and what follows from it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from adaptive_platform.checkpoints.store import CheckpointStore
from adaptive_platform.collectives import CollectiveError, Membership
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
from adaptive_platform.report.records import DecisionRecord, StepRecord
from adaptive_platform.training.adversaries import with_adversaries
from adaptive_platform.training.cadence import crossed, is_over
from adaptive_platform.training.checkpoint_writer import CheckpointWriter
from adaptive_platform.training.held_records import HeldRecords, Record
from adaptive_platform.training.measuring import refuse_unmet_needs
from adaptive_platform.training.observer import Observer, SilentObserver
from adaptive_platform.training.parts import Lasting, Parts, assemble
from adaptive_platform.training.recording import decision_record, step_record
from adaptive_platform.training.regrouping import (
    NextMembers,
    Regrouping,
    Standing,
    Tail,
    align,
)
from adaptive_platform.training.step import Measured
from adaptive_platform.training.unison import raise_first

__all__ = ["TrainingRun"]

_MIB = 2**20

_ALL_PARTS = 1_000
_JOIN_SECONDS = 10.0
"""All have just said that they are there."""


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
        regrouping: Finds others to go on with when workers are lost, join or leave; None where a
            lost worker ends the run.
        joining: This worker joins a run under way, whose workers have the state: it makes itself
            ready alone, and asks `regrouping` to be let in when the iteration begins.
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
        regrouping: Regrouping | None = None,
        joining: bool = False,
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
        self.left = False
        """True when this worker left as planned, and the others went on."""
        self._clock = clock
        self._loss = loss
        self._data_config = data_config
        self._regrouping = regrouping if recipe.is_live else None
        writer = None
        if store is not None:
            writer = CheckpointWriter(store, recipe.checkpoint, self.observer.keep)
        self._lasting = Lasting(writer=writer)
        self._lost: CollectiveError | None = None
        self._tail: Tail | None = None
        self._held = HeldRecords()
        self._out_of_memory = False
        self._saved_at: Progress | None = None
        self._wire(self._assemble(membership, recipe.reducer.timeout_seconds))
        self._device = self.reducer.device
        self._joining = joining
        try:
            if not joining:
                self._begin(must_resume)
        except BaseException:
            self.close()
            raise

    def _assemble(self, membership: Membership, join_seconds: float) -> Parts:
        return assemble(
            self.recipe,
            self.model,
            self.source,
            self._data_config,
            membership,
            loss=self._loss,
            observer=self.observer,
            lasting=self._lasting,
            join_seconds=join_seconds,
            roll_call=self._regrouping is None,
        )

    def _wire(self, parts: Parts) -> None:
        self.state = parts.state
        self.reducer = parts.reducer
        self._optimizer = parts.optimizer
        self._buckets = parts.buckets
        self._step = parts.step
        self._rates = parts.rates
        self._tell = parts.tell
        self._share = parts.share
        self._stragglers = parts.stragglers
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
    def _share_done(self) -> float:
        return 1.0 if self._has_its_length else self.fraction_done

    @property
    def fraction_done(self) -> float:
        """Share of the run's length that lies behind, in [0, 1]."""
        return min(self._rates.schedule_time() / self.recipe.stop.horizon.value, 1.0)

    def __iter__(self) -> Iterator[MicroBatch]:
        self.model.train()
        if self._joining:
            self._regroup(None)
        while True:
            try:
                yield from self._to_the_end()
                return
            except CollectiveError as error:
                lost = error
            self._regroup(lost)

    def _to_the_end(self) -> Iterator[MicroBatch]:
        if self._tail is not None:
            self._follow_up()  # Of the last step before a worker was lost.
        begun = self.state.evaluated_at or Progress(dataset_size=self.progress.dataset_size)
        missed = self._evaluated.took_snapshot(self.progress.step) and begun != self.progress
        due = missed or crossed(self.recipe.report.evaluate_every, begun, self.progress)
        if due and not self.interrupted:
            self.evaluate()  # It was due when the run was stopped.
        while not self.finished and not self.left:
            yield from self._one_step()
        if not self.interrupted and not self.left:
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
            try:
                self._step.backward(losses, correct)
            except CollectiveError as error:
                self._lost = error  # For the loop's next pass, as it is not the user's.

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
        if self._lasting.writer is not None:
            self._persistence.wait()
            self._lasting.writer.close()

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
                change_requested=self._regrouping is not None and self._regrouping.change_wanted(),
                durable_step=self.observer.durable_step() if self.is_first else 0,
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
        self._held.forget_before(measured.durable_step)
        if measured.broken:
            left_out = share.left_out.tolist() if share else []
            self._tell.left_out(self.reducer, broken, left_out)
        ids = None
        if self.recipe.report.record_sample_ids:
            mine = [i for m in (share.microbatches if share else []) for i in m.ids.tolist()]
            ids = self.reducer.all_gather_object(mine)
        self._settle(measured, consumed, share, started, ids)
        for slow in self._stragglers.observe(measured.paces):
            self._tell.event(
                "straggler",
                f"worker {slow.rank} takes {slow.ratio:.1f} times as long per sample as the others",
            )
        self._follow_up()

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
            if self._lost is not None:
                lost, self._lost = self._lost, None
                raise lost
            if self._out_of_memory:
                self._step.abandon()
                return
            if self._step.backward_done != done + 1:
                raise UserError(
                    "backward: call run.backward(losses) once for each micro-batch of the loop."
                )

    def _settle(
        self,
        measured: Measured,
        consumed: int,
        share: Share | None,
        started: float,
        ids: list[list[int]] | None,
    ) -> None:
        """Commit or drop the step. No worker is talked to: whoever gets here has done it whole."""
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
            seconds=self._clock() - started,
            data_seconds=share.wait_seconds if share else 0.0,
            cache_mib=share.cached_bytes / _MIB if share else 0.0,
            sample_ids=ids,
        )
        if measured.counts:
            self._measuring.speed(record.microbatch, record.accumulation, record.step_seconds)
        self._tail = Tail(
            before=before,
            record=record,
            counts=measured.counts,
            stop=measured.stop_requests > 0,
            change=measured.change_requests > 0,
        )

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

    def _follow_up(self) -> None:
        """What comes after a step, part by part; each one ends with what is not to be repeated."""
        parts = (
            self._measure_more,
            self._tell_and_decide,
            self._end_cycle_if_due,
            self._score_if_due,
            self._save_if_due,
        )
        while self._tail is not None:
            if self._tail.done == len(parts):
                change, self._tail = self._tail.change, None
                if change and not self.finished:
                    self._regroup(None)
                return
            parts[self._tail.done]()
            self._tail = replace(self._tail, done=self._tail.done + 1)

    def _measure_more(self) -> None:
        assert self._tail is not None
        if self._epoch_ended:
            self._measuring.curvature()
        if self._tail.counts:
            self._measuring.refit(epoch_ended=self._epoch_ended)

    @property
    def _epoch_ended(self) -> bool:
        return self._tail is not None and self.progress.epoch != self._tail.before.epoch

    def _tell_and_decide(self) -> None:
        tail, state = self._tail, self.state
        assert tail is not None
        curvature = state.summary().hessian_top_eigenvalue
        self._record(replace(tail.record, hessian_top_eigenvalue=curvature))
        if not tail.counts:
            return
        observation = self._measuring.observation()
        decision = state.controller.decide(observation)
        blind = "noise" in self.recipe.batch.needs and not observation.summary.observations
        if decision.considered and blind:
            self._tell.warn_once(decision.reason)
        if decision.considered:
            self._record(
                decision_record(
                    decision,
                    kind=self.recipe.batch.kind,
                    old_batch=state.global_batch,
                    progress=self.progress,
                    expected=self._measuring.forecast(decision, observation),
                )
            )
        state.global_batch = decision.global_batch
        self._evaluated.visit(self.progress.step, self._share_done)
        advice = self._measuring.advice() if self._epoch_ended else None
        if advice is not None and self.is_first:
            self._tell.event("advice", advice.reason)
            if self.recipe.membership.follow_advice:
                self.observer.advice(advice.workers)

    def _end_cycle_if_due(self) -> None:
        assert self._tail is not None
        if self.progress.step > self._tail.before.step:
            self._evaluated.end_cycle(
                self.progress.step,
                self._rates.schedule_time(),
                self._share_done,
                self._scoring.refresh,
            )

    def _score_if_due(self) -> None:
        assert self._tail is not None
        due = crossed(self.recipe.report.evaluate_every, self._tail.before, self.progress)
        committed = self.progress.step > self._tail.before.step
        if committed and self._evaluated.took_snapshot(self.progress.step):
            due = True
        if due and not self._tail.stop:
            self.evaluate()

    def _save_if_due(self) -> None:
        tail = self._tail
        assert tail is not None
        if tail.stop:
            self.interrupted = True
            self._tell.event("stop", "asked to stop: saving and leaving together")
            self.save()
            return
        self._persistence.poll()
        best = self.recipe.checkpoint.keep_best and self.state.best_step == self.progress.step
        if best or crossed(self.recipe.checkpoint.every, tail.before, self.progress):
            self.save()

    def _record(self, record: Record) -> None:
        if self._regrouping is not None:
            self._held.add(record)
        if self.is_first:
            self._tell_observer(record)

    def _tell_observer(self, record: Record) -> None:
        if isinstance(record, StepRecord):
            self.observer.step(record, self.fraction_done)
        elif isinstance(record, DecisionRecord):
            self.observer.decision(record)
        else:
            self.observer.evaluation(record)

    def _finish(self) -> None:
        if self.state.evaluated_at != self.progress:
            self.evaluate()
        if self._saved_at != self.progress:
            self.save()
        self._copies.strategy.settle()

    # --- other workers ------------------------------------------------------------------------

    def _regroup(self, failure: CollectiveError | None) -> None:
        """Go on with others: the same model, data position and batch.

        Raises:
            CollectiveError: There are none; `failure` itself where there is one.
        """
        if self._regrouping is None:
            assert failure is not None
            raise failure
        began = self._clock()
        was_member = not self._joining
        lost: tuple[str, ...] = ()
        was_first = self.is_first and was_member
        while True:
            self._step.give_up()
            self._resources.close()
            after = self._regrouping.next(failure)
            if after is None:
                self.left = True
                if was_first:
                    self.observer.follow()
                return
            lost += after.lost
            try:
                self._wire(self._assemble(after.membership, _JOIN_SECONDS))
                self._align()
                break
            except CollectiveError as again:
                failure = again
        self._joining = False
        self.model.train()
        if self.is_first and not was_first:
            self.observer.lead(self._held.records, self.progress.step)
        elif was_first and not self.is_first:
            self.observer.follow()
        self._tell_of(replace(after, lost=lost), self._clock() - began)

    def _tell_of(self, after: NextMembers, seconds: float) -> None:
        for who in after.lost:
            self._tell.event("lost", f"{who}; the step in hand is made again without it")
        for who in after.left:
            self._tell.event("left", f"{who}; nothing was lost")
        if after.joined:
            self._tell.event("joined", f"{after.joined} worker(s) joined")
        number = self.reducer.world_size
        plan = f", sums by {self.reducer.plan.describe()}" if number > 1 else ""
        self._tell.event("regrouped", f"{number} worker(s) go on after {seconds:.2f} s{plan}")

    def _align(self) -> None:
        """Everyone to where the furthest worker stands."""
        state = self.state
        mine = None
        if not self._joining:
            parts = self._tail.done if self._tail is not None else _ALL_PARTS
            mine = Standing(self.progress.epoch, self.progress.cursor, parts)

        def pack() -> tuple[dict[str, Any], Any]:
            held = self._held
            beside = (self._tail, self._saved_at, self.interrupted, held.first, held.records)
            return self._persistence.content(), beside

        def unpack(content: dict[str, Any], beside: Any) -> None:
            content["natural"] = None
            self._persistence.load(content)
            self._tail, self._saved_at, self.interrupted, first, records = beside
            new = self._held.take_over(first, records)
            for record in new if self.is_first and not self._joining else ():
                self._tell_observer(record)

        align(self.reducer, mine, pack=pack, unpack=unpack, device=self._device)
        limits = [m for m in self.reducer.all_gather_object(state.memory_limit) if m is not None]
        state.memory_limit = min(limits, default=None)

    # --- evaluation and checkpoints -----------------------------------------------------------

    def evaluate(self) -> None:
        """Score the held-out set, where there is one. All workers take part."""
        if self.source.eval is None:
            self.state.evaluated_at = self.progress
            return
        with self._copies.agreed():
            record = self._scoring.score()
        if record is not None:
            self._record(record)
        self.state.evaluated_at = self.progress

    def save(self) -> None:
        """Publish a checkpoint. All workers take part; storage trouble is told, not fatal."""
        self._persistence.save()
        self._saved_at = self.progress
