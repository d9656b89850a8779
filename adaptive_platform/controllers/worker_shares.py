"""How many samples each worker takes, by how fast it is: a pure decision, alike on all workers.

Shares are whole parts of a round, such as 10, 10 and 4 of 24. A worker's time for a step is taken
to be its parts times its seconds per sample; parts are dealt so that the slowest worker's time is
least. Where a pass also costs something that does not depend on its samples, this moves too little
at a time and never too much, and goes on with the next measurement.
"""

from __future__ import annotations

import heapq
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["WorkerShares", "balanced", "slowest"]

_PARTS_PER_WORKER = 8
_WINDOW = 8
"""Steps that are looked at, all of them since the last change."""
_SEEN = 4
"""Of these, how many a worker has to have had samples in."""
_WORTHWHILE = 1.15
"""Times as long as with better shares that a step has to take before shares are changed."""


def balanced(paces: Sequence[float], parts: int) -> tuple[int, ...]:
    """Parts of each worker with the least time of the slowest; at least one each.

    Args:
        paces: Seconds per sample of each worker, all > 0.
        parts: To be dealt, at least one per worker.
    """
    dealt = [1] * len(paces)
    # Whoever would end first with one more gets it; ties go to the lowest rank.
    queue = [(2 * pace, rank) for rank, pace in enumerate(paces)]
    heapq.heapify(queue)
    for _ in range(parts - len(paces)):
        _, rank = queue[0]
        dealt[rank] += 1
        heapq.heapreplace(queue, ((dealt[rank] + 1) * paces[rank], rank))
    return tuple(dealt)


def slowest(paces: Sequence[float], parts: Sequence[int]) -> float:
    """Time of the slowest worker, in seconds per sample of the whole step."""
    return max(p * n for p, n in zip(paces, parts, strict=True)) / sum(parts)


class WorkerShares:
    """Follows the workers' speeds with some patience."""

    def __init__(self) -> None:
        self.begin(1)

    def begin(self, world_size: int) -> None:
        """Other workers: all get the same."""
        self.parts: tuple[int, ...] = (1,) * world_size
        """Of each worker, by rank."""
        self._seen: deque[tuple[float, ...]] = deque(maxlen=_WINDOW)

    def observe(self, paces: Sequence[float]) -> bool:
        """Take one step in.

        Args:
            paces: Seconds per sample of each worker's own passes, by rank; 0 for one without
                samples.

        Returns:
            True where shares are others from the next step on.
        """
        if len(paces) < 2:
            return False
        self._seen.append(tuple(paces))
        if len(self._seen) < _WINDOW:
            return False
        columns = [
            [pace for pace in column if pace > 0.0] for column in zip(*self._seen, strict=True)
        ]
        if any(len(column) < _SEEN for column in columns):
            return False
        typical = [statistics.median(column) for column in columns]
        better = self._better(typical)
        if slowest(typical, self.parts) < _WORTHWHILE * slowest(typical, better):
            return False
        self.parts = better
        self._seen.clear()
        return True

    def _better(self, paces: Sequence[float]) -> tuple[int, ...]:
        """The best shares; equal ones where these are about as good."""
        best = balanced(paces, _PARTS_PER_WORKER * len(paces))
        even = (1,) * len(paces)
        return even if slowest(paces, even) < _WORTHWHILE * slowest(paces, best) else best

    def describe(self) -> str:
        """In words, for people."""
        if len(set(self.parts)) == 1:
            return "all workers take the same number of samples again"
        shares = ", ".join(f"{part / sum(self.parts):.0%}" for part in self.parts)
        return f"workers take {shares} of a step's samples, by their speeds"

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers for a checkpoint."""
        return {"parts": list(self.parts), "seen": [list(row) for row in self._seen]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`; shares of another number of workers mean nothing here."""
        if len(state["parts"]) == len(self.parts):
            self.parts = tuple(state["parts"])
            self._seen = deque(map(tuple, state["seen"]), maxlen=_WINDOW)
