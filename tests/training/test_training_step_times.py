"""Times of a step where the host only queues work: those of the device, read after it is done."""

from __future__ import annotations

import pytest
import torch

from adaptive_platform.training.step_times import DeviceTimes, HostTimes, times_for


class Queue:
    """A device that has done nothing of what was queued until `synchronize`; times in ms."""

    def __init__(self) -> None:
        self.end = 0.0
        self.done = 0.0

    def work(self, milliseconds: float) -> None:
        self.end += milliseconds

    def synchronize(self) -> None:
        self.done = self.end

    def record(self) -> Mark:
        return Mark(self, self.end)


class Mark:
    def __init__(self, queue: Queue, at: float) -> None:
        self.queue = queue
        self.at = at

    def elapsed_time(self, end_event: Mark) -> float:
        assert max(self.at, end_event.at) <= self.queue.done, "an event is read too soon"
        return end_event.at - self.at


def step(times: DeviceTimes, queue: Queue, samples: int, passes: float, sums: float):
    times.begin()
    queue.work(passes)
    pace = times.passes_ended(samples)
    queue.work(sums)
    times.sums_ended()
    queue.synchronize()
    return pace, times.waited()


def test_the_device_waits_from_the_end_of_its_backward_and_not_from_its_launch() -> None:
    queue = Queue()
    times = DeviceTimes(queue.record)
    assert step(times, queue, 8, passes=400.0, sums=30.0) == (0.0, pytest.approx(0.03))
    assert step(times, queue, 8, passes=800.0, sums=50.0) == pytest.approx((0.05, 0.05))
    assert step(times, queue, 0, passes=0.0, sums=450.0) == pytest.approx((0.0, 0.45))
    assert step(times, queue, 4, passes=400.0, sums=0.0) == pytest.approx((0.1, 0.0))


def test_the_host_times_its_own_calls() -> None:
    times = times_for(torch.device("cpu"))
    assert isinstance(times, HostTimes)
    times.begin()
    assert times.passes_ended(0) == 0.0
    assert times.passes_ended(2) > 0.0
    times.sums_ended()
    assert times.waited() > 0.0
