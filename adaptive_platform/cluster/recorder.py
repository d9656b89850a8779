"""The observer of a worker in a cluster: records to the run directory and to the driver."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

from adaptive_platform.cluster.backend import stop_signalled
from adaptive_platform.cluster.mailbox import MailboxClient
from adaptive_platform.errors import UserError
from adaptive_platform.report.journal import Journal, JournalError
from adaptive_platform.report.records import DecisionRecord, EvalRecord, EventRecord, StepRecord
from adaptive_platform.training.held_records import Record

__all__ = ["Recorder"]


class Recorder:
    """Watches one worker's run. Only the first worker talks to the driver and keeps a journal.

    Events that come before `open` wait for the journal, which can be opened only once it is known
    from which step the run goes on. The journal is written on a thread of its own.

    Args:
        mailbox: The driver; None where there is none to talk to, and on workers that never lead.
        flush_seconds: Records are written at least this often.
        open_journal: The journal from a step on, for a worker that becomes the first.
        first: This worker is the first one to begin with.
    """

    def __init__(
        self,
        mailbox: MailboxClient | None,
        flush_seconds: float,
        *,
        open_journal: Callable[[int], Journal] | None = None,
        first: bool = True,
    ) -> None:
        self._journal: Journal | None = None
        self._open_journal = open_journal
        self._first = first
        self._told_step = self._durable_step = 0
        self._early: list[EventRecord] = []
        self._taking_over: tuple[int, list[Record]] | None = None
        """The step to begin from, and what waits, where a journal could not be opened yet."""
        self._mailbox = mailbox
        self._flush_seconds = flush_seconds
        self._flushed_at = time.monotonic()
        self._writer = ThreadPoolExecutor(1, "journal")
        self._writing: Future[None] | None = None
        self._one_at_a_time = threading.Lock()
        self._fraction = 0.0
        self._started = False
        self._asked = False
        self._save_seconds: float | None = None

    def open(self, journal: Journal) -> None:
        """Keep records in `journal` from now on."""
        self._journal = journal
        early, self._early = self._early, []
        for record in early:
            journal.event(record)
        for part in journal.damaged:
            self.note(f"records in {part} were damaged and are set aside")

    def lead(self, records: Sequence[Record], step: int) -> None:
        """See `Observer.lead`."""
        self.be_first()
        if self._open_journal is None:
            return
        # What the last first worker wrote of the same steps goes, and is written again.
        oldest = min((record.step for record in records), default=step + 1)
        self._taking_over = min(oldest - 1, step), list(records)
        self._take_over()

    def _take_over(self) -> None:
        """Open the journal of a worker that became the first; where that fails, later again."""
        assert self._open_journal is not None
        assert self._taking_over is not None
        step, records = self._taking_over
        try:
            journal = self._open_journal(step)
        except UserError as error:
            self._flushed_at = time.monotonic()
            told = f"records are kept in memory: {error}"
            warning = EventRecord(time=time.time(), step=0, kind="warning", text=told)
            self._early.append(warning)
            self.send("event", warning)
            return
        self._taking_over = None
        self._journal = journal
        for record in records:
            self._take_down(record)
        self.open(journal)

    def _take_down(self, record: Record) -> None:
        journal = self._journal
        if journal is None:
            if self._taking_over is not None:
                self._taking_over[1].append(record)
        elif isinstance(record, StepRecord):
            journal.step(record)
        elif isinstance(record, DecisionRecord):
            journal.decision(record)
        else:
            journal.evaluation(record)

    def be_first(self) -> None:
        """This worker talks to the driver from now on; its journal is opened by the caller."""
        self._first = True

    def follow(self) -> None:
        """Another worker is the first one from now on; what was not written is its to write."""
        self._first = False
        self._journal = self._taking_over = None

    def saved_in(self, seconds: float) -> None:
        """A checkpoint was written in that time; the event that tells of it carries it along."""
        self._save_seconds = seconds

    def durable_step(self) -> int:
        """See `Observer.durable_step`."""
        keeps = self._journal is not None or self._taking_over is not None
        return self._durable_step if keeps else self._told_step

    def note(self, text: str) -> None:
        """An event outside of any step."""
        self.event(EventRecord(time=time.time(), step=0, kind="note", text=text))

    def step(self, record: StepRecord, fraction_done: float) -> None:
        """See `Observer.step`."""
        self._fraction = fraction_done
        self._told_step = record.step
        if self._taking_over is None:
            self._early = []  # Without a journal by now there will be none.
        self._take_down(record)
        if not self._started:
            self._started = True
            self.send("started", {"first_step": time.time()})
        self.send("step", record)
        if time.monotonic() - self._flushed_at >= self._flush_seconds:
            self.flush()

    def decision(self, record: DecisionRecord) -> None:
        """See `Observer.decision`."""
        self._take_down(record)
        if record.new_batch != record.old_batch:
            self.send("decision", record)

    def evaluation(self, record: EvalRecord) -> None:
        """See `Observer.evaluation`."""
        self._take_down(record)
        self.send("evaluation", record)

    def event(self, record: EventRecord) -> None:
        """See `Observer.event`. File names that are no text are shown with their bytes escaped."""
        text = record.text.encode("utf-8", "backslashreplace").decode()
        record = replace(record, text=text)
        if record.kind == "checkpoint":
            record = replace(record, seconds=self._save_seconds)
        if self._journal is None:
            self._early.append(record)
        else:
            self._journal.event(record)
            if record.kind in ("checkpoint", "stop"):
                self.flush()
        self.send("event", record)

    def advice(self, workers: int) -> None:
        """See `Observer.advice`."""
        self.send("advice", {"workers": workers})

    def ask_to_stop(self) -> None:
        """Let all workers finish the step in hand, save, and leave."""
        self._asked = True

    def stop_requested(self) -> bool:
        """True after SIGTERM to this process, `ask_to_stop`, or the driver's wish."""
        return (
            self._asked
            or stop_signalled()
            or (self._first and self._mailbox is not None and self._mailbox.stop_requested)
        )

    def changing(self) -> int | None:
        """On the first worker, the generation that is about to change; None where none is."""
        return self._mailbox.changing if self._first and self._mailbox is not None else None

    def send(self, kind: str, record: Any) -> None:
        """Post to the driver, where there is one and this worker is the first."""
        if self._first and self._mailbox is not None:
            self._mailbox.send(kind, record, self._fraction)

    def flush(self) -> None:
        """Begin to write what waits; where the storage fails it keeps waiting and people hear."""
        if self._taking_over is not None:
            self._take_over()
        if self._journal is None:
            return
        if self._writing is not None:
            if not self._writing.done():
                return  # Still at the last ones: the next flush takes these along.
            self._tell_of(self._writing)
        self._flushed_at = time.monotonic()
        self._writing = self._writer.submit(self._write)

    def keep(self) -> None:
        """See `Observer.keep`. What the storage refuses now is kept in memory and told later."""
        with suppress(JournalError):
            self._write()

    def _write(self) -> None:
        with self._one_at_a_time:
            # Looked up only now: another one may have become the first while this one waited.
            journal, step = self._journal, self._told_step
            if journal is not None:
                journal.flush()
                self._durable_step = step

    def close(self) -> None:
        """Write and post everything."""
        if self._writing is not None:
            self._tell_of(self._writing)
            self._writing = None
        if self._taking_over is not None:
            self._take_over()
        if self._journal is not None:
            self.flush()
            assert self._writing is not None
            self._tell_of(self._writing)
            self._journal = self._writing = None
        self._writer.shutdown()
        if self._first and self._mailbox is not None:
            self._mailbox.flush()

    def _tell_of(self, writing: Future[None]) -> None:
        try:
            writing.result()
        except JournalError as error:
            warning = EventRecord(time=time.time(), step=0, kind="warning", text=str(error))
            self.send("event", warning)
