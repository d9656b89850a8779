"""A point in time after which an operation counts as failed."""

from __future__ import annotations

import time
from datetime import timedelta

__all__ = ["Deadline"]


class Deadline:
    """Counts down from its making.

    Args:
        seconds: Length of the whole operation.
    """

    def __init__(self, seconds: float) -> None:
        self._started = time.monotonic()
        self._seconds = seconds

    @property
    def elapsed_seconds(self) -> float:
        """Seconds since the operation began."""
        return time.monotonic() - self._started

    @property
    def remaining_seconds(self) -> float:
        """Seconds left, never below 1 ms: backends read zero as "no limit"."""
        return max(0.001, self._seconds - self.elapsed_seconds)

    @property
    def passed(self) -> bool:
        """True when no time is left."""
        return self.elapsed_seconds >= self._seconds

    @property
    def remaining(self) -> timedelta:
        """The same as a time delta, in whole milliseconds."""
        return timedelta(milliseconds=max(1, int(self.remaining_seconds * 1000)))
