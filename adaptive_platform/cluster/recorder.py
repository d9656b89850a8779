"""The observer of a worker in a cluster: records to the run directory and to the driver."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

from adaptive_platform.cluster.backend import stop_signalled
from adaptive_platform.cluster.mailbox import MailboxClient
from adaptive_platform.report.journal import Journal, JournalError
from adaptive_platform.report.records import DecisionRecord, EvalRecord, EventRecord, StepRecord

__all__ = ["Recorder"]


class Recorder:
    """Watches one worker's run. Only rank 0 is given a mailbox and opens a journal.

    Events that come before `open` wait for the journal, which can be opened only once it is known
    from which step the run goes on. The journal is written on a thread of its own.

    Args:
        mailbox: The driver; None on other ranks and where there is no driver to talk to.
        flush_seconds: Records are written at least this often.
    """

    def __init__(self, mailbox: MailboxClient | None, flush_seconds: float) -> None:
        self._journal: Journal | None = None
        self._early: list[EventRecord] = []
        self._mailbox = mailbox
        self._flush_seconds = flush_seconds
        self._flushed_at = time.monotonic()
        self._writer = ThreadPoolExecutor(1, "journal")
        self._writing: Future[None] | None = None
        self._one_at_a_time = threading.Lock()
        self._fraction = 0.0
        self._started = False
        self._asked = False

    def open(self, journal: Journal) -> None:
        """Keep records in `journal` from now on."""
        self._journal = journal
        early, self._early = self._early, []
        for record in early:
            journal.event(record)
        for part in journal.damaged:
            self.note(f"records in {part} were damaged and are set aside")

    def note(self, text: str) -> None:
        """An event outside of any step."""
        self.event(EventRecord(time=time.time(), step=0, kind="note", text=text))

    def step(self, record: StepRecord, fraction_done: float) -> None:
        """See `Observer.step`."""
        self._fraction = fraction_done
        self._early = []  # Without a journal by now there will be none.
        if self._journal is not None:
            self._journal.step(record)
        if not self._started:
            self._started = True
            self.send("started", {"first_step": time.time()})
        self.send("step", record)
        if time.monotonic() - self._flushed_at >= self._flush_seconds:
            self.flush()

    def decision(self, record: DecisionRecord) -> None:
        """See `Observer.decision`."""
        if self._journal is not None:
            self._journal.decision(record)
        if record.new_batch != record.old_batch:
            self.send("decision", record)

    def evaluation(self, record: EvalRecord) -> None:
        """See `Observer.evaluation`."""
        if self._journal is not None:
            self._journal.evaluation(record)
        self.send("evaluation", record)

    def event(self, record: EventRecord) -> None:
        """See `Observer.event`. File names that are no text are shown with their bytes escaped."""
        text = record.text.encode("utf-8", "backslashreplace").decode()
        record = replace(record, text=text)
        if self._journal is None:
            self._early.append(record)
        else:
            self._journal.event(record)
            if record.kind in ("checkpoint", "stop"):
                self.flush()
        self.send("event", record)

    def ask_to_stop(self) -> None:
        """Let all workers finish the step in hand, save, and leave."""
        self._asked = True

    def stop_requested(self) -> bool:
        """True after SIGTERM to this process, `ask_to_stop`, or the driver's wish."""
        return (
            self._asked
            or stop_signalled()
            or (self._mailbox is not None and self._mailbox.stop_requested)
        )

    def send(self, kind: str, record: Any) -> None:
        """Post to the driver, where there is one."""
        if self._mailbox is not None:
            self._mailbox.send(kind, record, self._fraction)

    def flush(self) -> None:
        """Begin to write what waits; where the storage fails it keeps waiting and people hear."""
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
        journal = self._journal
        with self._one_at_a_time:
            if journal is not None:
                journal.flush()

    def close(self) -> None:
        """Write and post everything."""
        if self._writing is not None:
            self._tell_of(self._writing)
            self._writing = None
        if self._journal is not None:
            self.flush()
            assert self._writing is not None
            self._tell_of(self._writing)
            self._journal = self._writing = None
        self._writer.shutdown()
        if self._mailbox is not None:
            self._mailbox.flush()

    def _tell_of(self, writing: Future[None]) -> None:
        try:
            writing.result()
        except JournalError as error:
            warning = EventRecord(time=time.time(), step=0, kind="warning", text=str(error))
            self.send("event", warning)
