"""Runs operations one after the other on one background thread, in the order of the calls."""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
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
    def __init__(self, function: Callable[[], None]) -> None:
        self._function: Callable[[], None] | None = function
        self._finished = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        assert self._function is not None
        try:
            self._function()
        except BaseException as error:
            self._error = error
        finally:
            self._function = None  # it holds the buffer
            self._finished.set()

    def wait(self) -> None:
        # No limit here: every function in the queue has one, and fails at once after a failure.
        self._finished.wait()
        if self._error is not None:
            raise self._error

    @property
    def done(self) -> bool:
        return self._finished.is_set()


class OrderedThread:
    """One thread and its queue.

    Args:
        name: Of the thread, for people who look at a stack dump.
    """

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        # A daemon: an operation that a lost peer holds up must not hold up the interpreter's end.
        self._thread = threading.Thread(
            target=_run_all, args=(self._queue,), name=name, daemon=True
        )
        self._thread.start()

    def submit(self, function: Callable[[], None]) -> Pending:
        """Run `function` after all that were submitted before."""
        job = _Job(function)
        self._queue.put(job)
        return job

    def close(self) -> None:
        """Finish what is queued and end the thread."""
        self._queue.put(None)
        self._thread.join()


def _run_all(jobs: queue.SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job.run()
        del job  # what it held is free while the thread sleeps
