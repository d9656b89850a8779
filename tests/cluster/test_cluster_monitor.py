"""What the driver makes of the messages that reach it."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from adaptive_platform.cluster.mailbox import MailboxClient, Message
from adaptive_platform.cluster.monitor import Monitor
from adaptive_platform.cluster.recorder import Recorder
from adaptive_platform.report.records import StepRecord


class Post:
    """The actor's end: an answer comes at once."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.post = self

    def remote(self, messages: list[Message]) -> Any:
        self.messages += messages
        return self

    def future(self) -> Future[tuple[bool, int | None]]:
        answer: Future[tuple[bool, int | None]] = Future()
        answer.set_result((False, None))
        return answer


def step(number: int, batch: int) -> StepRecord:
    return StepRecord(
        step=number, epoch=0, samples_seen=8, scale_invariant_step=1.0, world_size=1,
        global_batch=batch, microbatch=8, accumulation=1, lr=0.1, gain=1.0, loss=1.0,
        grad_sqnorm=1.0,
    )  # fmt: skip


@pytest.mark.parametrize("initial", [32, None])
def test_the_first_batch_is_the_runs_own_however_steps_are_thinned(initial):
    """The post just before the first step delays it, and the second takes its place."""
    post = Post()
    recorder = Recorder(MailboxClient(post), 1.0)
    recorder.send("batch", {"initial": initial, "now": 64})
    recorder.step(step(1, 64), 0.1)
    recorder.step(step(2, 96), 0.2)
    recorder.close()
    told = [fields["step"] for kind, fields, _ in post.messages if kind == "step"]
    assert told == [2]
    monitor = Monitor(None, 0.0, "1 epochs")
    monitor.take(post.messages)
    assert monitor.any_step
    assert monitor.result(None, 0).initial_batch == initial
