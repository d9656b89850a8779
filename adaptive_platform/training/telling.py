"""What a run tells its observer besides steps: events, warnings once, broken samples once."""

from __future__ import annotations

import time
from collections.abc import Iterable

from adaptive_platform.collectives import Reducer
from adaptive_platform.data import BrokenSample
from adaptive_platform.report.records import EventRecord
from adaptive_platform.training.observer import Observer
from adaptive_platform.training.regrouping import NextMembers
from adaptive_platform.training.state import RunState
from adaptive_platform.training.unison import everyones

__all__ = ["Teller"]


class Teller:
    """Speaks on the first worker and is silent on the others.

    Args:
        observer: Hears it.
        state: Says at which step it happened.
        first: This is the worker that is heard.
        told: What was told before and is not told twice; grows.
    """

    def __init__(
        self, observer: Observer, state: RunState, *, first: bool, told: set[str] | None = None
    ) -> None:
        self._observer = observer
        self._state = state
        self._first = first
        self._told = told if told is not None else set()

    def event(self, kind: str, text: str) -> None:
        """Tell that something happened."""
        if self._first:
            step = self._state.progress.step
            self._observer.event(EventRecord(time=time.time(), step=step, kind=kind, text=text))

    def warn_once(self, text: str) -> None:
        """Tell a warning, unless the same one was told before."""
        if text not in self._told:
            self._told.add(text)
            self.event("warning", text)

    def regrouped(self, after: NextMembers, reducer: Reducer, seconds: float) -> None:
        """Tell who is lost, who left and who joined, and how the others go on.

        Args:
            after: What became of the workers, over all tries.
            reducer: Those who go on.
            seconds: From the loss, or the request, to the next step.
        """
        for who in after.lost:
            self.event("lost", f"{who}; the step in hand is made again without it")
        for who in after.left:
            self.event("left", f"{who}; nothing was lost")
        if after.joined:
            self.event("joined", f"{after.joined} worker(s) joined")
        number = reducer.world_size
        plan = f", sums by {reducer.plan.describe()}" if number > 1 else ""
        self.event("regrouped", f"{number} worker(s) go on after {seconds:.2f} s{plan}")

    def left_out(self, reducer: Reducer, broken: list[BrokenSample], beside: list[int]) -> None:
        """Enter everyone's broken samples in the ledger, and tell. All workers take part.

        Args:
            reducer: The workers.
            broken: This worker's samples of the step that could not be read.
            beside: Ids of its readable ones that lost their micro-batch to them.

        Raises:
            DataError: More samples are broken than the policy allows.
        """
        self.broken("training", self._state.ledger.record(everyones(reducer, broken)))
        everyone = everyones(reducer, beside)
        if everyone:
            self.event(
                "warning",
                f"{len(everyone)} readable sample(s) left out as well: broken ones left too few "
                "for a micro-batch",
            )

    def broken(self, part: str, samples: Iterable[BrokenSample]) -> None:
        """Tell of samples that could not be read, of each once.

        Args:
            part: `training` or `held-out`.
            samples: Those of all workers.
        """
        for sample in samples:
            if sample.where not in self._told:
                self._told.add(sample.where)
                self.event("broken_sample", f"left out of {part}: {sample}")
