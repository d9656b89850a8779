"""The one channel between a running job and its driver: records one way, wishes the other.

`ray.train.report` is a barrier over all workers that its controller polls, so nothing that
happens per step may go through it. Rank 0 posts to this actor a few times a second instead.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import asdict, fields
from typing import Any

import ray

from adaptive_platform.cluster.membership import (
    Assignment,
    Member,
    MembershipDesk,
    MembershipStatus,
)
from adaptive_platform.report.records import StepRecord

__all__ = ["Mailbox", "MailboxClient", "Message", "open_mailbox"]

Message = tuple[str, dict[str, Any], float]
"""What it is (`step`, `decision`, `evaluation`, `event`, `started`, `batch`, `ended`, `pace`), its
fields, and the share of the run that was done. `batch` holds the global batch that the run began
with and the one that it goes on with: steps are thinned on their way, and take fewer samples at the
end of an epoch. `pace` holds the times of all steps since the last post, and
how many of them were skipped; only metrics need it."""

_POST_SECONDS = 0.25
_STEP_FIELDS = tuple(each.name for each in fields(StepRecord) if each.name != "sample_ids")


class Mailbox:
    """Actor that holds messages until the driver collects them, and the list of workers.

    Args:
        labels: Of the run's metrics; none are exported where None.
        max_workers: Most workers of the run.
        max_losses: Losses without a committed step in between that are borne; see `Roster`.
    """

    def __init__(
        self, labels: dict[str, str] | None = None, max_workers: int = 1, max_losses: int = 0
    ) -> None:
        from adaptive_platform.cluster.exporter import Exporter

        self._exporter = Exporter(labels) if labels is not None else None
        self._messages: list[Message] = []
        self._stop = False
        self._final: dict[str, Any] | None = None
        self._desk = MembershipDesk(max_workers, max_losses)

    def end(self, failure: dict[str, Any]) -> None:
        """An error that another attempt can't mend; the first one counts."""
        if self._final is None:
            self._final = failure
            self._messages.append(("failed", failure, 0.0))
            self._desk.end()

    def final(self) -> dict[str, Any] | None:
        """The error that ended the run, for workers that Ray started again in vain."""
        return self._final

    def post(self, messages: list[Message]) -> tuple[bool, int | None]:
        """Add messages.

        Returns:
            Whether the run was asked to stop, and the number of the generation whose workers are to
            change; None where they are to stay.
        """
        if self._exporter is not None:
            self._exporter.take(messages)
        self._messages += [message for message in messages if message[0] != "pace"]
        for kind, content, _ in messages:
            if kind == "step" and not content["skipped"]:
                self._desk.roster.commit(content["step"])
            elif kind == "ended":
                self._desk.roster.conclude()
            elif kind == "advice":
                self._desk.want(content["workers"])
        roster = self._desk.roster
        return self._stop, roster.generation.number if roster.change_wanted else None

    def collect(self) -> list[Message]:
        """Take all messages out."""
        if self._exporter is not None:
            self._exporter.again()
        taken, self._messages = self._messages, []
        return taken

    def ask_to_stop(self) -> None:
        """Let the next `post` say that the run should stop."""
        self._stop = True

    # --- live membership; see `MembershipDesk` -------------------------------------------------

    def enroll(self, attempt: str, rank: int, world_size: int, member: Member) -> None:
        """See `MembershipDesk.enroll`."""
        self._desk.enroll(attempt, rank, world_size, member)

    async def next(self, attempt: str, member: Member, join: bool) -> Assignment:
        """See `MembershipDesk.next`."""
        return await self._desk.next(attempt, member, join=join)

    def lose(self, attempt: str, name: str, why: str) -> None:
        """See `MembershipDesk.lose`."""
        self._desk.lose(attempt, name, why)

    def finish(self, attempt: str, name: str) -> None:
        """See `MembershipDesk.finish`."""
        self._desk.finish(attempt, name)

    async def verdict(self) -> str:
        """See `MembershipDesk.verdict`."""
        return await self._desk.verdict()

    def status(self) -> MembershipStatus:
        """See `MembershipDesk.status`."""
        return self._desk.status()

    def drain(self, nodes: set[str]) -> None:
        """See `MembershipDesk.drain`."""
        self._desk.drain(nodes)


def open_mailbox(
    labels: dict[str, str] | None = None, *, max_workers: int = 1, max_losses: int = 0
) -> Any:
    """Start a mailbox next to the driver; its handle can be sent to workers.

    Args:
        labels: Of the run's metrics, as in `report.metrics.LABELS`; none are exported where None.
        max_workers: Most workers of the run.
        max_losses: Losses without a committed step in between that are borne; see `Roster`.
    """
    here = ray.get_runtime_context().get_node_id()
    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(here, soft=False)
    # Each worker that waits for the next list holds one call open.
    actor = ray.remote(num_cpus=0, max_concurrency=10_000)(Mailbox)
    options = actor.options(scheduling_strategy=strategy)
    return options.remote(labels, max_workers, max_losses)


class MailboxClient:
    """The worker's side: collects messages and posts them without ever waiting for an answer.

    Per-step records are thinned to the newest one of each post; all else is kept. What a step costs
    is therefore a few list operations, and a post, 0.5 ms of this thread, comes four times a second
    however short steps are. A mailbox that died with its driver's node costs the run nothing but
    its audience.
    """

    def __init__(self, mailbox: Any) -> None:
        self._mailbox = mailbox
        self._waiting: list[Message] = []
        self._newest_step: tuple[StepRecord, float] | None = None
        self._step_seconds: list[float] = []
        self._skipped = 0
        self._answer: Future[tuple[bool, int | None]] | None = None
        self._posted_at = 0.0
        self._stop = False
        self._changing: int | None = None

    @property
    def stop_requested(self) -> bool:
        """True once an answer said that the driver wants the run to stop."""
        self._read_answer()
        return self._stop

    @property
    def changing(self) -> int | None:
        """The generation whose workers are to change, by the last answer; None for no change.

        An answer may be older than the change that it asks for.
        """
        self._read_answer()
        return self._changing

    def send(self, kind: str, record: Any, fraction_done: float) -> None:
        """Queue a record and post when it is time.

        Args:
            kind: See `Message`.
            record: A `StepRecord` for `step`, else any dataclass, or a dictionary.
            fraction_done: Share of the run that lies behind it.
        """
        if kind == "step":
            self._newest_step = (record, fraction_done)
            self._step_seconds.append(record.step_seconds)
            self._skipped += record.skipped
        else:
            content = record if isinstance(record, dict) else asdict(record)
            self._waiting.append((kind, content, fraction_done))
        if time.monotonic() - self._posted_at >= _POST_SECONDS:
            self._post()

    def flush(self, timeout_seconds: float = 10.0) -> None:
        """Post everything and wait until it has arrived."""
        self._read_answer(timeout_seconds)
        self._post()
        self._read_answer(timeout_seconds)

    def _post(self) -> None:
        self._read_answer()
        if self._answer is not None:
            return  # The last post is still on its way; what is new waits for the next.
        messages = self._waiting
        if self._newest_step is not None:
            record, fraction = self._newest_step
            content = {name: getattr(record, name) for name in _STEP_FIELDS}
            pace = {"step_seconds": self._step_seconds, "skipped": self._skipped}
            messages = [*messages, ("step", content, fraction), ("pace", pace, fraction)]
        self._waiting, self._newest_step, self._step_seconds, self._skipped = [], None, [], 0
        self._posted_at = time.monotonic()
        # Asking Ray for an answer costs more than a step may; its own threads bring this one.
        self._answer = self._mailbox.post.remote(messages).future()

    def _read_answer(self, timeout_seconds: float = 0.0) -> None:
        if self._answer is None:
            return
        if timeout_seconds:
            wait([self._answer], timeout_seconds)
        if not self._answer.done():
            return
        with suppress(ray.exceptions.RayError):
            stop, self._changing = self._answer.result()
            self._stop = self._stop or stop
        self._answer = None
