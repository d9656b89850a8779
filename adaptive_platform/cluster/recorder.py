"""The observer of a worker in a cluster: records to the run directory and to the driver."""

from __future__ import annotations

import time
from typing import Any

from adaptive_platform.cluster.backend import stop_signalled
from adaptive_platform.cluster.mailbox import MailboxClient
from adaptive_platform.report.journal import Journal, JournalError
from adaptive_platform.report.records import DecisionRecord, EvalRecord, EventRecord, StepRecord

__all__ = ["Recorder"]


class Recorder:
    """Watches one worker's run. Only rank 0 is given a journal and a mailbox.

    Records that come before `open` wait for the journal, which can be opened only once it is
    known from which step the run goes on.

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
        self._fraction = 0.0
        self._started = False

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
        """See `Observer.event`."""
        if self._journal is not None:
            self._journal.event(record)
            if record.kind in ("checkpoint", "stop"):
                self.flush()
        else:
            self._early.append(record)
        self.send("event", record)

    def stop_requested(self) -> bool:
        """True after SIGTERM to this process, or when the driver asks."""
        return stop_signalled() or (self._mailbox is not None and self._mailbox.stop_requested)

    def send(self, kind: str, record: Any) -> None:
        """Post to the driver, where there is one."""
        if self._mailbox is not None:
            self._mailbox.send(kind, record, self._fraction)

    def flush(self) -> None:
        """Write what waits; where the storage fails it keeps waiting and people are told."""
        self._flushed_at = time.monotonic()
        if self._journal is None:
            return
        try:
            self._journal.flush()
        except JournalError as error:
            warning = EventRecord(time=time.time(), step=0, kind="warning", text=str(error))
            self.send("event", warning)

    def close(self) -> None:
        """Write and post everything."""
        self.flush()
        if self._mailbox is not None:
            self._mailbox.flush()
