"""The journal of a run: buffers records and publishes them as Parquet parts in the run directory.

journal = Journal("runs/quickstart", resume_step=None)
journal.step(record)
journal.flush()
pandas.read_parquet("runs/quickstart/steps")
"""

from __future__ import annotations

import os
from typing import Any

from adaptive_platform.errors import UserError
from adaptive_platform.report.parts import PartTable
from adaptive_platform.report.records import DecisionRecord, EvalRecord, EventRecord, StepRecord
from adaptive_platform.storage import join, open_location

__all__ = ["TABLES", "Journal", "JournalError"]

TABLES: dict[str, type] = {
    "steps": StepRecord,
    "decisions": DecisionRecord,
    "evals": EvalRecord,
    "events": EventRecord,
}
"""Folders of a run directory that hold records, and what a row of each is."""


class JournalError(RuntimeError):
    """Records could not be written now. They are kept: warn, go on, and flush again later."""


class Journal:
    """The only writer of a run's records; one per run, on one worker.

    Each `flush` adds one part per table that has new rows; a part appears whole or not at all, and
    many small ones are merged into one now and then. After a kill, at most the rows since the last
    flush are missing. A merge that is killed half way may leave rows twice until the journal is
    opened again; `read_run` knows and counts them once.

    Args:
        run_dir: A local path or any URI that pyarrow knows; made where it is missing.
        resume_step: None for a new run. Otherwise the committed steps of the checkpoint that
            training goes on from (0: from the start): rows of earlier attempts with a greater
            `step` are removed. Events stay, as the history of what happened.
        skipped: Steps that were skipped between that step and the checkpoint; their rows stay.
        epoch: Of the checkpoint; None where scores of its step at a later epoch (all steps in
            between were skipped) need not be told apart.

    Raises:
        UserError: The directory can't be written to, or holds records and `resume_step` is None.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        resume_step: int | None = None,
        *,
        skipped: int = 0,
        epoch: int | None = None,
    ) -> None:
        system, root = open_location(run_dir)
        self._rows: dict[str, list[Any]] = {name: [] for name in TABLES}
        try:
            self._tables = {
                name: PartTable(system, join(root, name), record) for name, record in TABLES.items()
            }
            if resume_step is None and any(table.num_parts for table in self._tables.values()):
                raise UserError(
                    f"{os.fspath(run_dir)} already holds the records of a run. Continue that run "
                    f"with resume={os.fspath(run_dir)}, or give another directory with out=DIR."
                )
            for name, table in self._tables.items():
                if resume_step is not None and name != "events":
                    table.truncate(
                        resume_step,
                        skipped=skipped if name == "steps" else 0,
                        epoch=epoch if name == "evals" else None,
                    )
                if not table.num_parts:
                    table.append([])  # so that pandas finds the columns before the first row
        except OSError as error:
            raise UserError(
                f"{os.fspath(run_dir)} can't be used as run directory: {error}. "
                "Give a directory that can be written to with out=DIR."
            ) from error

    @property
    def damaged(self) -> list[str]:
        """Parts of earlier attempts that could not be read: their rows are missing from now on.

        They are set aside under a name that starts with `_damaged-`. Tell the user.
        """
        return [f"{name}/{part}" for name, table in self._tables.items() for part in table.damaged]

    def step(self, record: StepRecord) -> None:
        """Take down a step. Steps come in order."""
        self._rows["steps"].append(record)

    def decision(self, record: DecisionRecord) -> None:
        """Take down a decision of the batch controller."""
        self._rows["decisions"].append(record)

    def evaluation(self, record: EvalRecord) -> None:
        """Take down the scores of a pass over held-out data."""
        self._rows["evals"].append(record)

    def event(self, record: EventRecord) -> None:
        """Take down what else happened."""
        self._rows["events"].append(record)

    @property
    def num_pending(self) -> int:
        """Records that are not yet in the run directory."""
        return sum(len(rows) for rows in self._rows.values())

    def flush(self) -> None:
        """Publish what was taken down since the last flush.

        May run in another thread than the one that takes records down, but in one at a time.

        Raises:
            JournalError: The storage refused at least one table. Its records stay in memory, in
                order, and the next `flush` tries again; the other tables were written.
        """
        failures = []
        for name, rows in self._rows.items():
            pending = rows[:]
            if not pending:
                continue
            try:
                self._tables[name].append(pending)
            except OSError as error:
                failures.append((name, len(pending), error))
            else:
                del rows[: len(pending)]  # more may have come meanwhile
        if failures:
            told = "; ".join(f"{count} of {name} ({error})" for name, count, error in failures)
            raise JournalError(f"records could not be written and are kept in memory: {told}")
