"""When a step's own passes began and ended, and when its sums were there: by host or by device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch

__all__ = ["DeviceTimes", "HostTimes", "StepTimes", "times_for"]


class StepTimes(Protocol):
    """Called in this order in each step; `waited` only once the host has read the sums."""

    def begin(self) -> None:
        """Before the first pass."""

    def passes_ended(self, samples: int) -> float:
        """After the last own backward; gives the pace to tell the others, in seconds per sample.

        Args:
            samples: That the passes were over; the pace is 0 where there are none.
        """

    def sums_ended(self) -> None:
        """After the reduction, before the host reads its result."""

    def waited(self) -> float:
        """Seconds from the end of the last backward to the sums."""


class HostTimes:
    """Where a call returns when its work is done: CPUs."""

    def begin(self) -> None:
        """See `StepTimes`."""
        self._began = time.perf_counter()

    def passes_ended(self, samples: int) -> float:
        """See `StepTimes`."""
        self._ended = time.perf_counter()
        return (self._ended - self._began) / samples if samples else 0.0

    def sums_ended(self) -> None:
        """See `StepTimes`."""

    def waited(self) -> float:
        """See `StepTimes`."""
        return time.perf_counter() - self._ended


class DeviceTimes:
    """Where calls only queue work: GPUs, which time it themselves by events in their queue.

    Events are read after the host synchronisation that a step has anyhow, so the pace, which
    travels with the sums, is that of the step before.

    Args:
        record: Puts a new event into the device's queue.
    """

    def __init__(self, record: Callable[[], torch.cuda.Event]) -> None:
        self._record = record
        self._pace = 0.0

    def begin(self) -> None:
        """See `StepTimes`."""
        self._began = self._record()

    def passes_ended(self, samples: int) -> float:
        """See `StepTimes`."""
        self._ended, self._samples = self._record(), samples
        return self._pace if samples else 0.0

    def sums_ended(self) -> None:
        """See `StepTimes`."""
        self._summed = self._record()

    def waited(self) -> float:
        """See `StepTimes`."""
        if self._samples:
            self._pace = _seconds(self._began, self._ended) / self._samples
        return _seconds(self._ended, self._summed)


def times_for(device: torch.device) -> StepTimes:
    """What times steps on `device`."""
    if device.type != "cuda":
        return HostTimes()

    def record() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event

    return DeviceTimes(record)


def _seconds(first: torch.cuda.Event, second: torch.cuda.Event) -> float:
    return float(first.elapsed_time(second)) / 1e3  # both have happened, so nothing waits
