"""Going on with other workers: who decides, how far each one is, and the furthest one's state."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from adaptive_platform.checkpoints.store import read_state
from adaptive_platform.collectives import CollectiveError, Membership, Reducer
from adaptive_platform.progress import Progress
from adaptive_platform.report.records import StepRecord
from adaptive_platform.training.unison import from_rank

__all__ = ["NextMembers", "Regrouping", "Standing", "Tail", "align"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NextMembers:
    """With whom a worker goes on, and what became of the others."""

    membership: Membership
    """Of a higher generation than the one before."""
    lost: tuple[str, ...] = ()
    """One description per worker that is gone, such as `worker 2 (process ended)`."""
    joined: int = 0
    """Workers that are new and need the state of the run."""
    left: tuple[str, ...] = ()
    """One description per worker that left as planned, such as `worker 1 (node drains)`."""


class Regrouping(Protocol):
    """One worker's link to whoever keeps the list of workers."""

    def change_wanted(self) -> bool:
        """True once this worker knows that somebody waits to join or should leave.

        Asked once a step; must not wait.
        """

    def next(self, failure: CollectiveError | None) -> NextMembers | None:
        """Wait for the next membership.

        Args:
            failure: Why the workers can't go on as they are; None for a planned change, which all
                of them come to between the same two steps.

        Returns:
            None for a worker that leaves.

        Raises:
            CollectiveError: There is nobody to go on with: `failure` itself where there is one.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """What follows a step whose outcome is final, in parts.

    A lost worker may interrupt one; those who go on make that one again.
    """

    before: Progress
    """Where the run stood before the step."""
    record: StepRecord
    """Of the step; complete once the first part is done."""
    counts: bool
    """The step was committed and not dropped."""
    stop: bool
    """Some worker was asked to stop."""
    change: bool
    """Some worker knows that the membership is to change."""
    done: int = 0
    """Parts that are behind us."""


@dataclass(frozen=True, slots=True, order=True)
class Standing:
    """How far a worker is; it can be one step, or a part of its tail, ahead of another."""

    epoch: int
    cursor: int
    parts: int
    """Parts of the last step's tail that are done; a large number where all are."""


def align(
    reducer: Reducer,
    mine: Standing | None,
    *,
    pack: Callable[[], tuple[dict[str, Any], Any]],
    unpack: Callable[[dict[str, Any], Any], None],
    device: torch.device,
) -> int:
    """Bring all workers to where the furthest one stands. All workers take part.

    Args:
        reducer: The workers.
        mine: How far this one is; None where it has no state of the run yet.
        pack: On the furthest worker (the first of several): a checkpoint of plain tensors, and
            whatever else the others need, which is pickled.
        unpack: Takes both over, on the workers that are behind.
        device: Where messages are sent from.

    Returns:
        The rank that state was taken from; -1 where all stood alike.

    Raises:
        CollectiveError: Another worker was lost meanwhile.
        RuntimeError: No worker has any state.
    """
    standings = reducer.all_gather_object(mine)
    known = [s for s in standings if s is not None]
    if not known:
        raise RuntimeError("no worker has the state of the run")
    furthest = max(known)
    if all(s == furthest for s in standings):
        return -1
    source = standings.index(furthest)
    content, beside = b"", None
    if reducer.rank == source:
        state, beside = pack()
        file = io.BytesIO()
        torch.save(state, file)
        content = file.getvalue()
    beside = reducer.all_gather_object(beside)[source]
    content = from_rank(reducer, content, device, source)
    if mine != furthest:
        unpack(read_state(content), beside)
    return source
