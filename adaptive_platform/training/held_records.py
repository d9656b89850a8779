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
        """Records of earlier steps are durable.

        All records of a step are held or none, as whoever becomes the first cuts the tables there
        and writes them again; and a score that follows skipped steps is of the step before them.
        """
        durable = self._num_before(step)
        oldest = min((record.step for record in self.records[durable:]), default=step)
        durable = self._num_before(min(step, oldest))
        if durable:
            self.first += durable
            del self.records[:durable]

    def _num_before(self, step: int) -> int:
        for number, record in enumerate(self.records):
            if record.step >= step:
                return number
        return len(self.records)

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
