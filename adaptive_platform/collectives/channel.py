"""Connects the workers, runs operations in call order, and turns a lost peer into one error.

What the operations are is the `Reducer`'s business. The first that fails closes the groups, so that
peers in the middle of one notice at once, and every later call raises the same error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from adaptive_platform.collectives.deadline import Deadline
from adaptive_platform.collectives.executor import Executor
from adaptive_platform.collectives.failure import CollectiveError, LinkError
from adaptive_platform.collectives.gloo import GlooExecutor
from adaptive_platform.collectives.groups import Membership, ProcessGroups
from adaptive_platform.collectives.nccl import Launched, NcclExecutor
from adaptive_platform.collectives.ordered import OrderedThread, Pending
from adaptive_platform.collectives.plan import Plan, ReducerConfig

__all__ = ["Channel"]

_ROLL_CALL_SECONDS = 1.0
"""Part of the time limit kept for asking who is still there."""


class Channel:
    """The executors of some plans and the order in which they work.

    Args:
        config: Of the reducer: limits, and what the executors are made with.
        membership: Who takes part; one worker alone gets no executor, no group and no thread.
        device: Where buffers live.
        plans: One executor each.
        join_seconds: Longest time until all workers are connected.
        roll_call: After a failure, ask who is still there, to name the lost ones in the error.

    Raises:
        CollectiveError: A worker did not join within the time limit.
        ValueError: This worker already has a reducer of this generation.
    """

    def __init__(
        self,
        config: ReducerConfig,
        membership: Membership,
        device: torch.device,
        plans: Sequence[Plan],
        join_seconds: float,
        *,
        roll_call: bool,
    ) -> None:
        self._config = config
        self._membership = membership
        self._device = device
        patience = min(_ROLL_CALL_SECONDS, config.timeout_seconds / 4)
        self._roll_call_seconds = patience if roll_call else 0.0
        self._seconds = 0.0
        self._failure: CollectiveError | None = None
        self._closed = False
        self._groups: ProcessGroups | None = None
        self._executors: tuple[Executor, ...] = ()
        self._thread: OrderedThread | None = None
        if membership.world_size > 1:
            self._connect(plans, join_seconds)

    @property
    def executors(self) -> tuple[Executor, ...]:
        """In the order of the plans; none where a worker is alone."""
        return self._executors

    @property
    def seconds(self) -> float:
        """Time spent in what was begun, whether or not anyone waited for it."""
        return self._seconds

    def check(self) -> None:
        """Raise what an earlier operation met.

        Raises:
            CollectiveError: An earlier operation failed.
            RuntimeError: It is closed.
        """
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise RuntimeError("this reducer is closed")

    def begin(self, act: Callable[[Deadline], None], num_bytes: int) -> Pending:
        """Let `act` run after everything begun before, behind the caller's back or in `wait`.

        Args:
            act: One operation of an executor of CPU tensors.
            num_bytes: Its length; what is short is put off.
        """
        assert self._thread is not None

        def timed(limit: Deadline) -> None:
            began = time.perf_counter()
            act(limit)
            self._seconds += time.perf_counter() - began

        return self._thread.submit(lambda: self._attempt(timed), num_bytes)

    def launch(self, launch: Callable[[], Launched], executor: NcclExecutor) -> Pending:
        """Queue an operation of that executor on its CUDA stream."""
        launched: list[Launched] = []
        self._attempt(lambda _: launched.append(launch()))
        return _OnStream(self, executor, launched[0])

    def now(self, act: Callable[[Executor, Deadline], None]) -> None:
        """Do `act` after everything begun before, and wait for it; nothing for a worker alone."""
        self.check()
        if not self._executors:
            return
        executor = self._executors[0]  # they differ in `reduce` only
        if self._thread is None:
            self._attempt(lambda limit: act(executor, limit))
            return
        self._thread.submit(lambda: self._attempt(lambda limit: act(executor, limit)), 0).wait()

    def close(self) -> None:
        """Let queued operations end, then give back thread and connections. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        if self._thread is not None:
            self._thread.close()
        if self._groups is not None:
            self._groups.close(broken=self._failure is not None)

    def _connect(self, plans: Sequence[Plan], join_seconds: float) -> None:
        limit = Deadline(join_seconds)
        config, rank = self._config, self._membership.rank
        trouble: LinkError | None = None
        try:
            self._groups = ProcessGroups(
                self._membership, plans, self._device, config.timeout_seconds, join_seconds
            )
        except LinkError as error:
            trouble = error.bare()
        if trouble is not None:
            raise self._error(trouble, limit, trouble.peers)
        groups = self._groups
        assert groups is not None
        if self._device.type == "cuda":
            self._executors = tuple(
                NcclExecutor(plan, index, groups, rank, self._device)
                for index, plan in enumerate(plans)
            )
            return
        self._executors = tuple(
            GlooExecutor(plan, index, groups, rank, config.segment_bytes, config.num_slices)
            for index, plan in enumerate(plans)
        )
        self._thread = OrderedThread(f"reducer-{rank}", int(config.lazy_kib * 1024))

    def _attempt(self, act: Callable[[Deadline], None]) -> None:
        """Run one operation; on failure close the groups, see who is left, and raise."""
        if self._failure is not None:
            raise self._failure
        limit = Deadline(self._config.timeout_seconds - self._roll_call_seconds)
        trouble: LinkError | None = None
        try:
            act(limit)
        except LinkError as error:
            trouble = error.bare()
        if trouble is None:
            return
        assert self._groups is not None
        self._groups.close(broken=True)
        silent: tuple[int, ...] = ()
        if self._roll_call_seconds:
            silent = self._groups.roll_call(self._roll_call_seconds)
        named = tuple(peer for peer in trouble.peers if peer in silent) or silent or trouble.peers
        self._failure = self._error(trouble, limit, named)
        raise self._failure

    def _error(
        self, trouble: LinkError, limit: Deadline, peers: tuple[int, ...]
    ) -> CollectiveError:
        return CollectiveError(
            operation=trouble.operation,
            group=trouble.group,
            rank=self._membership.rank,
            world_size=self._membership.world_size,
            generation=self._membership.generation,
            timeout_seconds=self._config.timeout_seconds,
            after_seconds=limit.elapsed_seconds,
            peers=peers,
            reason=trouble.reason,
        )


class _OnStream(Pending):
    """An operation on a CUDA stream."""

    def __init__(self, channel: Channel, executor: NcclExecutor, launched: Launched) -> None:
        self._channel = channel
        self._executor = executor
        self._launched = launched

    def wait(self) -> None:
        self._channel._attempt(self._until_done)

    def _until_done(self, limit: Deadline) -> None:
        seconds = self._executor.await_launched(self._launched, "reduce", limit)
        self._channel._seconds += seconds

    @property
    def done(self) -> bool:
        return self._launched.ended.query()
