"""Records that may not be on disk yet, kept by every worker: each could become the one to write."""

from __future__ import annotations

from adaptive_platform.report.records import DecisionRecord, EvalRecord, StepRecord

__all__ = ["HeldRecords", "Record"]

Record = StepRecord | DecisionRecord | EvalRecord


class HeldRecords:
    """The newest records of a run, numbered through from its start, alike on all workers."""

    def __init__(self) -> None:
        self.first = 0
        """Number of the oldest record that is held."""
        self.records: list[Record] = []

    def add(self, record: Record) -> None:
        """Hold one more."""
        self.records.append(record)

    def forget_before(self, step: int) -> None:
        """Records of earlier steps are durable."""
        durable = 0
        while durable < len(self.records) and self.records[durable].step < step:
            durable += 1
        if durable:
            self.first += durable
            del self.records[:durable]

    def take_over(self, first: int, records: list[Record]) -> list[Record]:
        """Catch up with a worker that is further.

        Args:
            first: Its oldest record's number.
            records: Its records.

        Returns:
            Those that are new here.
        """
        known = self.first + len(self.records)
        if known < first:  # has held nothing so far
            self.first, self.records = first, []
            known = first
        new = records[known - first :]
        self.records += new
        return new
