"""One step: its share of samples, the passes over it, and its end, committed or dropped."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from adaptive_platform.collectives import CollectiveError
from adaptive_platform.data import MicroBatch, Share, next_slice
from adaptive_platform.errors import DataError, RunFailedError, UserError
from adaptive_platform.gradients.loss import correct_predictions
from adaptive_platform.progress import Progress
from adaptive_platform.recipe import Recipe
from adaptive_platform.training.course import Course
from adaptive_platform.training.measured import Measured
from adaptive_platform.training.observer import Observer
from adaptive_platform.training.parts import Parts
from adaptive_platform.training.recording import step_record
from adaptive_platform.training.regrouping import Tail
from adaptive_platform.training.unison import raise_first

__all__ = ["Stepping"]

_MIB = 2**20


class Stepping:
    """Makes steps with one membership; what follows from a step is `FollowUp`'s.

    Args:
        recipe: The configuration.
        parts: What the run is made of.
        course: Gets the tail of each step.
        observer: Asked for stop requests, and for the step that is durable.
        change_wanted: Whether this worker knows of others that wait to join or should leave.
        clock: Seconds.
    """

    def __init__(
        self,
        recipe: Recipe,
        parts: Parts,
        course: Course,
        observer: Observer,
        change_wanted: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        self._recipe = recipe
        self._parts = parts
        self._course = course
        self._observer = observer
        self._change_wanted = change_wanted
        self._clock = clock
        self._current: MicroBatch | None = None
        self._lost: CollectiveError | None = None
        self._out_of_memory = False

    # --- what the loop says about the micro-batch in hand --------------------------------------

    def backward(self, losses: Tensor, outputs: Tensor | None) -> None:
        """See `TrainingRun.backward`."""
        if self._current is None:
            raise UserError("backward: there is no micro-batch yet; iterate over the run first.")
        targets = self._current.targets
        if losses.dim() == 1 and losses.shape[0] != targets.shape[0]:
            raise UserError(
                f"losses: {losses.shape[0]} losses for {targets.shape[0]} samples; give one each."
            )
        correct = correct_predictions(outputs, targets) if outputs is not None else None
        try:
            self._parts.step.backward(losses, correct)
        except CollectiveError as error:
            self._lost = error  # For the loop's next pass, as it is not the user's.

    def out_of_memory(self) -> None:
        """The micro-batch in hand did not fit."""
        self._out_of_memory = True

    # --- the step ---------------------------------------------------------------------------

    @property
    def _progress(self) -> Progress:
        return self._parts.state.progress

    def one(self) -> Iterator[MicroBatch]:
        """Yield this worker's micro-batches of the next step; its tail is in the course then.

        Raises:
            CollectiveError: A worker was lost; nothing of the step counts.
            DataError, RunFailedError: Too many steps in a row were dropped; on every worker alike.
        """
        parts, course = self._parts, self._course
        started = self._clock()
        before = self._progress
        consumed = next_slice(
            before.cursor, parts.state.global_batch, before.dataset_size, parts.minimum
        )
        share, fatal = parts.share.take(consumed)
        while True:
            yield from self._passes(consumed, share)
            broken = share.broken if share else []
            measured = parts.step.gather(
                stop_requested=self._observer.stop_requested(),
                broken=len(broken),
                fatal=fatal is not None,
                change_requested=self._change_wanted(),
                durable_step=self._observer.durable_step() if parts.is_first else 0,
            )
            if measured.fatal:
                raise_first(parts.reducer, fatal)
            if not measured.out_of_memory:
                break
            parts.step.undo()
            share = parts.share.smaller(share, consumed)
            parts.tell.event(
                "memory",
                f"out of memory on {measured.out_of_memory} worker(s): micro-batches of at most "
                f"{parts.state.memory_limit} samples from now on; the global batch stays",
            )
        course.held.forget_before(measured.durable_step)
        if measured.broken:
            left_out = share.left_out.tolist() if share else []
            parts.tell.left_out(parts.reducer, broken, left_out)
        ids = None
        if self._recipe.report.record_sample_ids:
            mine = [i for m in (share.microbatches if share else []) for i in m.ids.tolist()]
            ids = parts.reducer.all_gather_object(mine)
        self._settle(measured, consumed, share, started, ids)
        for slow in parts.stragglers.observe(measured.paces):
            parts.tell.event(
                "straggler",
                f"worker {slow.rank} takes {slow.ratio:.1f} times as long per sample as the others",
            )
        shares = parts.state.shares
        if shares is not None and shares.observe(measured.paces):
            parts.tell.event("rebalanced", shares.describe())

    def _passes(self, consumed: int, share: Share | None) -> Iterator[MicroBatch]:
        """This worker's micro-batches, up to the first that memory does not hold."""
        parts, state = self._parts, self._parts.state
        step, variance = self._progress.step, state.variance
        summed = parts.copies.strategy.sums_gradients(self._progress)
        self._out_of_memory = False
        parts.step.begin(
            global_batch=consumed,
            microbatches=len(share.microbatches) if share else 0,
            loss_scale=state.loss_scale.value,
            # What sparse sums give is a velocity with holes, which says nothing about noise.
            measure=summed and self._recipe.reducer.sparse is None and state.estimator.due(step),
            squares=variance is not None and variance.due(step),
            alone=not summed,
        )
        self._seed(step)
        parts.mixing.begin()
        for microbatch in share.microbatches if share else ():
            moved = microbatch.on(parts.reducer.device, parts.memory_format)
            self._current = parts.mixing(moved, self._progress.epoch)
            done = parts.step.backward_done
            yield self._current
            if self._lost is not None:
                lost, self._lost = self._lost, None
                raise lost
            if self._out_of_memory:
                parts.step.abandon()
                return
            if parts.step.backward_done != done + 1:
                raise UserError(
                    "backward: call run.backward(losses) once for each micro-batch of the loop."
                )

    def _seed(self, step: int) -> None:
        # Dropout and the like: a function of step and rank, so a resumed run draws the same.
        # `torch.manual_seed` would format a stack trace for each accelerator that is not there.
        seed = hash((self._recipe.seed, step, self._parts.reducer.rank)) & 0x7FFFFFFF
        torch.default_generator.manual_seed(seed)
        device = self._parts.reducer.device
        if device.type == "cuda":  # this one, whatever the thread's current device is
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)

    def _settle(
        self,
        measured: Measured,
        consumed: int,
        share: Share | None,
        started: float,
        ids: list[list[int]] | None,
    ) -> None:
        """Commit or drop the step: whoever gets here has done it whole, whatever the others do.

        Workers talk only once all is settled, and only where that ends the run.

        Raises:
            DataError, RunFailedError: Too many steps in a row were dropped; on every worker alike.
        """
        parts, state, before = self._parts, self._parts.state, self._progress
        microbatches = share.microbatches if share else []
        lr = gain = 0.0
        fatal: Exception | None = None
        if measured.counts:
            parts.measuring.noise(measured, parts.step, parts.buckets)
            summary = state.summary()
            lr = parts.rates.apply(measured.trained, summary)
            self._commit(measured)
            gain = summary.gain(measured.trained, parts.rates.base_batch)
            state.progress = before.committed(consumed, measured.trained, parts.rates.advance(gain))
            state.skipped_in_a_row = 0
            parts.mixing.commit()
        else:
            fatal = self._skip(measured, consumed)
        state.loss_scale = state.loss_scale.after(overflow=not measured.finite)
        record = step_record(
            measured,
            before=before,
            after=self._progress,
            microbatches=microbatches,
            summary=state.summary(),
            lr=lr,
            gain=gain,
            base_batch=parts.rates.base_batch,
            world_size=parts.reducer.world_size,
            seconds=self._clock() - started,
            data_seconds=share.wait_seconds if share else 0.0,
            cache_mib=share.cached_bytes / _MIB if share else 0.0,
            sample_ids=ids,
        )
        if measured.counts and microbatches:  # Without samples a step is others' time.
            parts.measuring.speed(record.microbatch, record.accumulation, record.step_seconds)
        self._course.tail = Tail(
            before=before,
            record=record,
            counts=measured.counts,
            stop=measured.stop_requests > 0,
            change=measured.change_requests > 0,
        )
        if fatal is not None:
            raise_first(parts.reducer, fatal)

    def _commit(self, measured: Measured) -> None:
        parts = self._parts
        strategy = parts.copies.strategy
        alone = not strategy.sums_gradients(self._progress)
        if alone:
            strategy.before_step()
        parts.step.commit(measured)
        if alone:
            strategy.after_step(parts.step.own_samples)

    def _skip(self, measured: Measured, consumed: int) -> Exception | None:
        """Drop the step; an error where that was one too many."""
        state = self._parts.state
        name = self._parts.step.skip()
        state.progress = state.progress.skipped(consumed)
        state.skipped_in_a_row += 1
        where = f"gradient of `{name}`" if name else "loss"
        why = f"non-finite {where}" if measured.trained else "none of its samples could be read"
        self._parts.tell.event("skip", f"step dropped by all workers: {why}")
        if state.skipped_in_a_row < self._recipe.precision.max_skipped_in_a_row:
            return None
        if measured.trained:
            return RunFailedError(
                f"{state.skipped_in_a_row} steps in a row were not finite; the first bad value is "
                f"in the {where}. Lower optimizer.lr, set clip_norm, or look at the data."
            )
        return DataError(
            f"data: no sample of {state.skipped_in_a_row} steps in a row could be read, or too few "
            "for batch norm. Mend the data, or lower data.max_broken_share to stop sooner."
        )
