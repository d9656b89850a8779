"""Which worker is slow: each one's seconds per sample against the others', over some steps."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Straggler", "Stragglers"]

_WINDOW = 10
_SHARE = 0.8
"""Of the window's steps in which a worker has to be slow, and below half of it recovered."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """A worker that is slower than the others."""

    rank: int
    ratio: float
    """Its seconds per sample over the median of the others', median over the window."""


class Stragglers:
    """Names a worker once when it becomes slow, and again only after it had recovered.

    Args:
        factor: Times as slow as the others that counts as slow.
    """

    def __init__(self, factor: float = 2.0) -> None:
        self._factor = factor
        self._ratios: deque[list[float | None]] = deque(maxlen=_WINDOW)
        self._named: set[int] = set()

    def observe(self, paces: Sequence[float]) -> list[Straggler]:
        """Take one step in.

        Args:
            paces: Seconds per sample of each worker, by rank; 0 for one without samples.

        Returns:
            Those that are slow now and were not named before.
        """
        if self._ratios and len(self._ratios[0]) != len(paces):
            self._ratios.clear()  # other workers: ranks mean something else
            self._named.clear()
        self._ratios.append([_ratio(paces, rank) for rank in range(len(paces))])
        if len(self._ratios) < _WINDOW:
            return []
        found = []
        for rank in range(len(paces)):
            ratios = [r for row in self._ratios if (r := row[rank]) is not None]
            slow = sum(ratio >= self._factor for ratio in ratios)
            if slow >= _SHARE * _WINDOW and rank not in self._named:
                self._named.add(rank)
                found.append(Straggler(rank, statistics.median(ratios)))
            elif slow < _SHARE * _WINDOW / 2:
                self._named.discard(rank)
        return found


def _ratio(paces: Sequence[float], rank: int) -> float | None:
    others = [pace for other, pace in enumerate(paces) if other != rank and pace > 0.0]
    if not others or paces[rank] <= 0.0:
        return None
    return paces[rank] / statistics.median(others)
