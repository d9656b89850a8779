"""Where one worker stands in its run, beside the run's state: kept when its peers change."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from adaptive_platform.progress import Progress
from adaptive_platform.training.held_records import HeldRecords, Record
from adaptive_platform.training.regrouping import Standing, Tail

__all__ = ["Course"]

_ALL_PARTS = 1_000


@dataclass(slots=True, kw_only=True)
class Course:
    """Alike on all workers between two parts of a step's tail."""

    tail: Tail | None = None
    """What is still to follow from the last step; None between steps."""
    saved_at: Progress | None = None
    """Of the newest checkpoint."""
    interrupted: bool = False
    """The run ends because it was asked to."""
    held: HeldRecords = field(default_factory=HeldRecords)
    """Records that may not be durable yet."""

    def standing(self, progress: Progress) -> Standing:
        """How far this worker is."""
        parts = self.tail.done if self.tail is not None else _ALL_PARTS
        return Standing(progress.epoch, progress.cursor, parts)

    def pack(self) -> Any:
        """For a worker that is behind."""
        return self.tail, self.saved_at, self.interrupted, self.held.first, self.held.records

    def take_over(self, packed: Any) -> list[Record]:
        """Stand where the worker stands that `pack` was called on.

        Returns:
            Its records that are new here.
        """
        self.tail, self.saved_at, self.interrupted, first, records = packed
        return self.held.take_over(first, records)
