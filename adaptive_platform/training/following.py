"""What follows a step whose outcome is final: records, a decision, a score, a checkpoint."""

from __future__ import annotations

from dataclasses import replace

from adaptive_platform.progress import Progress
from adaptive_platform.recipe import Recipe
from adaptive_platform.report.records import DecisionRecord, StepRecord
from adaptive_platform.training.cadence import crossed
from adaptive_platform.training.course import Course
from adaptive_platform.training.held_records import Record
from adaptive_platform.training.length import Length
from adaptive_platform.training.observer import Observer
from adaptive_platform.training.parts import Parts
from adaptive_platform.training.recording import decision_record
from adaptive_platform.training.regrouping import Tail

__all__ = ["FollowUp"]


class FollowUp:
    """Works off the tail of each step with one membership; all workers take part.

    Args:
        recipe: The configuration.
        parts: What the run is made of.
        course: Holds the tail.
        observer: Told of everything on rank 0.
        holds: Keep records until they are durable, as another worker could become the one to write.
    """

    def __init__(
        self, recipe: Recipe, parts: Parts, course: Course, observer: Observer, *, holds: bool
    ) -> None:
        self._recipe = recipe
        self._parts = parts
        self._course = course
        self._observer = observer
        self._holds = holds
        self.length = Length(recipe, parts.rates, parts.state)
        """How far the run is."""

    @property
    def _progress(self) -> Progress:
        return self._parts.state.progress

    @property
    def _tail(self) -> Tail:
        assert self._course.tail is not None
        return self._course.tail

    def run(self) -> bool:
        """Part by part; each one ends with what is not to be repeated.

        Returns:
            True where the membership is to change before the next step.
        """
        parts = (
            self._measure_more,
            self._tell_and_decide,
            self._end_cycle_if_due,
            self._score_if_due,
            self._save_if_due,
        )
        if self._course.tail is None:
            return False
        while self._tail.done < len(parts):
            parts[self._tail.done]()
            self._course.tail = replace(self._tail, done=self._tail.done + 1)
        change, self._course.tail = self._tail.change, None
        return change

    def catch_up(self) -> None:
        """Score what was due when the run was stopped."""
        state = self._parts.state
        begun = state.evaluated_at or Progress(dataset_size=self._progress.dataset_size)
        missed = self._parts.evaluated.took_snapshot(self._progress.step) and (
            begun != self._progress
        )
        due = missed or crossed(self._recipe.report.evaluate_every, begun, self._progress)
        if due and not self._course.interrupted:
            self.evaluate()

    def finish(self) -> None:
        """Score and save the end of the run, where that was not done."""
        if self._parts.state.evaluated_at != self._progress:
            self.evaluate()
        if self._course.saved_at != self._progress:
            self.save()
        self._parts.copies.strategy.settle()

    def evaluate(self) -> None:
        """See `TrainingRun.evaluate`."""
        if self._parts.scoring.has_samples:
            with self._parts.copies.agreed():
                record = self._parts.scoring.score()
            if record is not None:
                self._record(record)
        self._parts.state.evaluated_at = self._progress

    def save(self) -> None:
        """See `TrainingRun.save`."""
        self._parts.persistence.save()
        self._course.saved_at = self._progress

    def tell(self, record: Record) -> None:
        """Hand a record to the observer."""
        if isinstance(record, StepRecord):
            self._observer.step(record, self.length.fraction_done)
        elif isinstance(record, DecisionRecord):
            self._observer.decision(record)
        else:
            self._observer.evaluation(record)

    # --- parts ------------------------------------------------------------------------------

    def _measure_more(self) -> None:
        if self._epoch_ended:
            self._parts.measuring.curvature()
        if self._tail.counts:
            self._parts.measuring.refit(epoch_ended=self._epoch_ended)

    @property
    def _epoch_ended(self) -> bool:
        return self._progress.epoch != self._tail.before.epoch

    def _tell_and_decide(self) -> None:
        parts, tail, state = self._parts, self._tail, self._parts.state
        curvature = state.summary().hessian_top_eigenvalue
        self._record(replace(tail.record, hessian_top_eigenvalue=curvature))
        if not tail.counts:
            return
        observation = parts.measuring.observation()
        decision = state.controller.decide(observation)
        blind = "noise" in self._recipe.batch.needs and not observation.summary.observations
        if decision.considered and blind:
            parts.tell.warn_once(decision.reason)
        if decision.considered:
            self._record(
                decision_record(
                    decision,
                    kind=self._recipe.batch.kind,
                    old_batch=state.global_batch,
                    progress=self._progress,
                    expected=parts.measuring.forecast(decision, observation),
                )
            )
        state.global_batch = decision.global_batch
        parts.evaluated.visit(self._progress.step, self.length.share_done)
        advice = parts.measuring.advice() if self._epoch_ended else None
        if advice is not None and parts.is_first:
            parts.tell.event("advice", advice.reason)
            if self._recipe.membership.follow_advice:
                self._observer.advice(advice.workers)

    def _end_cycle_if_due(self) -> None:
        if self._progress.step > self._tail.before.step:
            self._parts.evaluated.end_cycle(
                self._progress.step,
                self._parts.rates.schedule_time(),
                self.length.share_done,
                self._parts.scoring.refresh,
            )

    def _score_if_due(self) -> None:
        tail = self._tail
        due = crossed(self._recipe.report.evaluate_every, tail.before, self._progress)
        committed = self._progress.step > tail.before.step
        if committed and self._parts.evaluated.took_snapshot(self._progress.step):
            due = True
        if due and not tail.stop:
            self.evaluate()

    def _save_if_due(self) -> None:
        tail, config = self._tail, self._recipe.checkpoint
        if tail.stop:
            self._course.interrupted = True
            self._parts.tell.event("stop", "asked to stop: saving and leaving together")
            self.save()
            return
        self._parts.persistence.poll()
        state = self._parts.state
        # A skipped step stands at the step before, whose score is not new.
        scored = state.evaluated_at == self._progress
        best = config.keep_best and scored and state.best_step == self._progress.step
        if best or crossed(config.every, tail.before, self._progress):
            self.save()

    def _record(self, record: Record) -> None:
        if self._holds:
            self._course.held.add(record)
        if self._parts.is_first:
            self.tell(record)
