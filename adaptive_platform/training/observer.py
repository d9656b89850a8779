"""Who watches a run: records go out; a wish to stop, and what is on disk by now, come back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from adaptive_platform.report.records import DecisionRecord, EvalRecord, EventRecord, StepRecord
from adaptive_platform.training.held_records import Record

__all__ = ["Observer", "SilentObserver"]


class Observer(Protocol):
    """Receives records on the first worker; asked for stop requests on every worker."""

    def step(self, record: StepRecord, fraction_done: float) -> None:
        """A step was committed or skipped; `fraction_done` of the run lies behind it."""

    def decision(self, record: DecisionRecord) -> None:
        """The batch controller decided."""

    def evaluation(self, record: EvalRecord) -> None:
        """The held-out set was scored."""

    def event(self, record: EventRecord) -> None:
        """Something else happened."""

    def keep(self) -> None:
        """Make durable what was told so far, and return when nothing is being written any more.

        Called before the workers change as planned, and, on the thread that writes checkpoints,
        before one is published. Records behind a checkpoint must not be lost:
        a run that goes on from it does not make them again.
        """

    def lead(self, records: Sequence[Record], step: int) -> None:
        """This worker is the first one from now on.

        Args:
            records: Those that the last first worker may not have made durable.
            step: Committed steps.
        """

    def follow(self) -> None:
        """Another worker is the first one from now on, and writes what is not durable."""

    def durable_step(self) -> int:
        """On the first worker: records of earlier steps are durable."""

    def advice(self, workers: int) -> None:
        """The run should have that many workers."""

    def stop_requested(self) -> bool:
        """True when this worker was asked to leave after the step in hand."""


class SilentObserver:
    """Watches nothing and never asks to stop."""

    def step(self, record: StepRecord, fraction_done: float) -> None:
        """See `Observer.step`."""

    def decision(self, record: DecisionRecord) -> None:
        """See `Observer.decision`."""

    def evaluation(self, record: EvalRecord) -> None:
        """See `Observer.evaluation`."""

    def event(self, record: EventRecord) -> None:
        """See `Observer.event`."""

    def keep(self) -> None:
        """See `Observer.keep`."""

    def lead(self, records: Sequence[Record], step: int) -> None:
        """See `Observer.lead`."""

    def follow(self) -> None:
        """See `Observer.follow`."""

    def durable_step(self) -> int:
        """Nothing is kept."""
        return 0

    def advice(self, workers: int) -> None:
        """See `Observer.advice`."""

    def stop_requested(self) -> bool:
        """Never."""
        return False
