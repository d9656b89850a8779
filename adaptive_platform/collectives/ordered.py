"""Runs operations one after the other, in the order of the calls, behind the caller's back."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

__all__ = ["Finished", "OrderedThread", "Pending"]


class Pending(ABC):
    """An operation that has been started."""

    @abstractmethod
    def wait(self) -> None:
        """Return when the operation is done.

        Raises:
            CollectiveError: It failed, or its time limit passed.
        """

    @property
    @abstractmethod
    def done(self) -> bool:
        """True when `wait` would return or raise at once."""


class Finished(Pending):
    """Nothing had to be done."""

    def wait(self) -> None:
        """Return at once."""

    @property
    def done(self) -> bool:
        """Always."""
        return True


class _Job(Pending):
    def __init__(self, owner: OrderedThread, function: Callable[[], None]) -> None:
        self._owner = owner
        self._function: Callable[[], None] | None = function
        self._done = False
        self._error: BaseException | None = None

    def run(self) -> None:
        assert self._function is not None
        try:
            self._function()
        except BaseException as error:
            self._error = error
        self._function = None  # it holds the buffer
        self._done = True

    def wait(self) -> None:
        # No limit here: every function in the queue has one, and fails at once after a failure.
        if not self._done:
            self._owner.finish(self)
        if self._error is not None:
            raise self._error

    @property
    def done(self) -> bool:
        return self._done


class OrderedThread:
    """One thread and its queue. What is short is done by whoever waits for it first.

    Handing an operation to the thread and its end back costs two changes of threads, which is more
    than a short message itself takes. So short ones do not wake the thread, until together they
    are no longer short or something long comes behind them.

    Args:
        name: Of the thread, for people who look at a stack dump.
        short: Sum of the lengths that may wait without waking the thread.
    """

    def __init__(self, name: str, short: int = 0) -> None:
        self._short = short
        self._lock = threading.Lock()
        self._for_thread = threading.Condition(self._lock)
        self._for_waiters = threading.Condition(self._lock)
        self._jobs: deque[_Job] = deque()
        self._waiting_length = 0
        self._running = self._awake = self._closed = False
        # A daemon: an operation that a lost peer holds up must not hold up the interpreter's end.
        self._thread = threading.Thread(target=self._run_all, name=name, daemon=True)
        self._thread.start()

    def submit(self, function: Callable[[], None], length: int | None = None) -> Pending:
        """Run `function` after all that were submitted before.

        Args:
            function: What to do.
            length: Its length, in the unit of `short`; None for one that wakes the thread.
        """
        job = _Job(self, function)
        with self._lock:
            self._jobs.append(job)
            self._waiting_length += length or 0
            if not self._awake and (length is None or self._waiting_length > self._short):
                self._awake = True
                self._for_thread.notify()
        return job

    def finish(self, job: _Job) -> None:
        """Return when `job` has run: here, where the thread has no part in it."""
        while not job.done:
            with self._lock:
                while not job.done and (self._awake or self._running):
                    self._for_waiters.wait()
                if job.done:
                    return
                first = self._take()
            self._run(first)

    def close(self) -> None:
        """Finish what is queued and end the thread."""
        with self._lock:
            self._closed = self._awake = True
            self._for_thread.notify()
        self._thread.join()

    def _take(self) -> _Job:
        self._running = True
        job = self._jobs.popleft()
        if not self._jobs:
            self._waiting_length = 0
        return job

    def _run(self, job: _Job) -> None:
        job.run()
        with self._lock:
            self._running = False
            self._for_waiters.notify_all()
            if self._awake:
                self._for_thread.notify()

    def _run_all(self) -> None:
        while True:
            with self._lock:
                while self._running or not self._awake:
                    self._for_thread.wait()
                if not self._jobs:
                    if self._closed:
                        return
                    self._awake = False
                    self._for_waiters.notify_all()
                    continue
                job = self._take()
            self._run(job)
            del job  # what it held is free while the thread sleeps
