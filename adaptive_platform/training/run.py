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
from adaptive_platform.collectives import CollectiveError, Membership, Reducer
from adaptive_platform.data import (
    DataConfig,
    DataSource,
    MicroBatch,
)
from adaptive_platform.gradients.loss import SampleLoss
from adaptive_platform.models import TrainingMode
from adaptive_platform.optimizers import ListeningOptimizer
from adaptive_platform.progress import Progress
from adaptive_platform.recipe import Recipe
from adaptive_platform.training.adversaries import with_adversaries
from adaptive_platform.training.checkpoint_writer import CheckpointWriter
from adaptive_platform.training.course import Course
from adaptive_platform.training.following import FollowUp
from adaptive_platform.training.measuring import refuse_unmet_needs
from adaptive_platform.training.observer import Observer, SilentObserver
from adaptive_platform.training.parts import Lasting, Parts, assemble
from adaptive_platform.training.regrouping import (
    Regrouping,
    align,
)
from adaptive_platform.training.state import RunState
from adaptive_platform.training.stepping import Stepping

__all__ = ["TrainingRun"]

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
        model: Any module, on its device. It is put into training mode; where only some of its
            modules come in evaluation mode, these are frozen and stay in it.
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
        self._training_mode = TrainingMode(model)
        self.recipe = recipe
        self.model = model
        self.source = source
        self.observer: Observer = observer or SilentObserver()
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
        self._course = Course()
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
        self._training_mode.apply()  # The smallest micro-batch depends on what is frozen.
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
        """Take up the parts of a new membership; what is the run's own goes on."""
        self._parts = parts
        regrouping = self._regrouping
        self._stepping = Stepping(
            self.recipe,
            parts,
            self._course,
            self.observer,
            regrouping.change_wanted if regrouping is not None else lambda: False,
            self._clock,
        )
        self._following = FollowUp(
            self.recipe, parts, self._course, self.observer, holds=regrouping is not None
        )

    def _begin(self, must_resume: bool) -> None:
        parts, state = self._parts, self.state
        if self.reducer.world_size > 1:
            parts.tell.event("note", f"gradients are summed by {self.reducer.describe()}")
        if isinstance(parts.optimizer, ListeningOptimizer):
            parts.tell.event("note", parts.optimizer.describe())
        if parts.persistence.restore(must_resume=must_resume):
            self._course.saved_at = self.progress
            allowed = parts.measuring.limits().clamp(state.global_batch)
            if allowed[0] != state.global_batch:
                state.global_batch = allowed[0]
                parts.tell.event("warning", f"batch goes on at {allowed[0]}: {allowed[1]}")
        else:
            start = self.recipe.batch.start(parts.measuring.limits())
            state.global_batch = state.initial_batch = start.global_batch
            if start.changed:
                parts.tell.event("warning", start.reason)

    # --- what a loop uses -------------------------------------------------------------------

    @property
    def state(self) -> RunState:
        """What steers the run, and is in each checkpoint."""
        return self._parts.state

    @property
    def progress(self) -> Progress:
        """Where the run stands."""
        return self.state.progress

    @property
    def reducer(self) -> Reducer:
        """The workers of now."""
        return self._parts.reducer

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """What turns gradients into steps; to look at, the run drives it."""
        return self._parts.optimizer

    @property
    def bytes_sent(self) -> int:
        """Bytes this worker put on the wire so far, those between some of the workers included."""
        return self.reducer.bytes_sent + self._parts.subgroups.bytes_sent

    @property
    def is_first(self) -> bool:
        """True on the worker that records and saves."""
        return self._parts.is_first

    @property
    def interrupted(self) -> bool:
        """True when the run ended because it was asked to."""
        return self._course.interrupted

    @property
    def finished(self) -> bool:
        """True when the run has its length, reached its target, or was asked to stop."""
        return self.interrupted or self._following.length.finished

    @property
    def fraction_done(self) -> float:
        """Share of the run's length that lies behind, in [0, 1]."""
        return self._following.length.fraction_done

    def __iter__(self) -> Iterator[MicroBatch]:
        self._training_mode.apply()
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
        self._follow_up()  # Of the last step before a worker was lost, where there is one.
        self._following.catch_up()
        while not self.finished and not self.left:
            yield from self._stepping.one()
            self._follow_up()
        if not self.interrupted and not self.left:
            self._following.finish()

    def _follow_up(self) -> None:
        if self._following.run() and not self.finished:
            if self._parts.ratios is not None:
                self._parts.ratios.make_whole()
            self._regroup(None)

    def backward(self, losses: Tensor, outputs: Tensor | None = None) -> None:
        """Back-propagate the micro-batch that the loop was given last.

        Args:
            losses: One loss per sample, shape (b,). The step sums them over all workers and
                divides by the true global batch, so no mean may be taken before.
            outputs: Class scores, for the training accuracy in the records; optional.

        Raises:
            UserError: `losses` is not one number per sample, or called twice.
        """
        with self.memory_guard():
            self._stepping.backward(losses, outputs)

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
        self._stepping.out_of_memory()

    def with_adversaries(self, batch: MicroBatch, loss: SampleLoss) -> MicroBatch:
        """The micro-batch with the controller's share of adversarial examples (ABSA).

        Args:
            batch: As the loop yields it.
            loss: The training loss per sample.
        """
        share = self.state.controller.adversarial_fraction
        optimizer = self._parts.optimizer
        with optimizer.paused() if isinstance(optimizer, ListeningOptimizer) else nullcontext():
            return with_adversaries(self.model, batch, loss, share, self.recipe.precision)

    def autocast(self) -> AbstractContextManager[Any]:
        """The recipe's number format, for forward and loss: `with run.autocast(): ...`."""
        return self.recipe.precision.autocast(self.reducer.device.type)

    @property
    def joining(self) -> bool:
        """True until this worker has taken the state of the run over and is one of its members."""
        return self._joining

    def close(self) -> None:
        """Finish the checkpoint under way, end decode processes and process groups.

        The model stays as it is. Safe to call twice.
        """
        self._parts.resources.close()
        if self._lasting.writer is not None:
            self._parts.persistence.wait()
            self._lasting.writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
            self._parts.step.give_up()
            self._parts.resources.close()
            if failure is None and was_first:
                # Another one may be the first next: nothing may be on its way to the storage then.
                self.observer.keep()
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
        if self.is_first and not was_first:
            self.observer.lead(self._course.held.records, self.progress.step)
        elif was_first and not self.is_first:
            self.observer.follow()
        seconds = self._clock() - began
        self._parts.tell.regrouped(replace(after, lost=lost), self.reducer, seconds)

    def _align(self) -> None:
        """Everyone to where the furthest worker stands."""
        persistence, state = self._parts.persistence, self.state

        def pack() -> tuple[dict[str, Any], Any]:
            return persistence.content(), self._course.pack()

        def unpack(content: dict[str, Any], beside: Any) -> None:
            content["natural"] = None
            persistence.load(content)
            new = self._course.take_over(beside)
            for record in new if self.is_first and not self._joining else ():
                self._following.tell(record)

        mine = None if self._joining else self._course.standing(self.progress)
        align(self.reducer, mine, pack=pack, unpack=unpack, device=self.reducer.device)
        limits = [m for m in self.reducer.all_gather_object(state.memory_limit) if m is not None]
        state.memory_limit = min(limits, default=None)

    # --- evaluation and checkpoints -----------------------------------------------------------

    def evaluate(self) -> None:
        """Score the held-out set, where there is one. All workers take part."""
        self._following.evaluate()

    def save(self) -> None:
        """Publish a checkpoint. All workers take part; storage trouble is told, not fatal."""
        self._following.save()
