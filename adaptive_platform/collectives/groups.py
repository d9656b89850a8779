"""Process groups that stand alone: built from a store, torn down, and built again for other sizes.

Nothing here touches torch's default group. Each generation of workers has its own names in the
store, so groups of two generations can live in one process at the same time.

What is not promised: a group cannot be interrupted. An operation that hangs ends when its own
limit passes; closing a group waits for that.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from adaptive_platform.collectives.deadline import Deadline
from adaptive_platform.collectives.failure import LinkError
from adaptive_platform.collectives.plan import Phase, Plan

__all__ = ["Group", "Membership", "ProcessGroups"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Membership:
    """Who works together, as one worker sees it."""

    store: Store
    """Shared by all workers and never written under a used generation again."""
    rank: int
    world_size: int
    generation: int = 0
    """Counts the groupings of a run. One reducer per generation and worker."""
    node_of_rank: tuple[str, ...] | None = None
    """Name of the machine of each rank."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} is not in [0, {self.world_size})")
        if self.node_of_rank is not None and len(self.node_of_rank) != self.world_size:
            raise ValueError(f"{len(self.node_of_rank)} node names for {self.world_size} workers")


@dataclass(frozen=True, slots=True)
class Group:
    """Some of the workers and torch's backend that connects them."""

    label: str
    """Such as `row 0 (workers 0-3)`."""
    ranks: tuple[int, ...]
    backend: Any
    """A `ProcessGroupGloo` or `ProcessGroupNCCL`; positions in `ranks` are its ranks."""


class ProcessGroups:
    """The group of all workers and those of a plan's phases.

    Args:
        membership: Who takes part; at least two workers.
        plans: Whose phases need groups; the groups they share are built once.
        device: `cpu` builds Gloo groups, `cuda` NCCL groups.
        timeout_seconds: Limit of each operation later.
        join_seconds: Limit for building everything.

    Raises:
        LinkError: A worker did not appear, or a connection failed, within the limit.
        ValueError: This worker already has a reducer of this generation.
    """

    def __init__(
        self,
        membership: Membership,
        plans: Sequence[Plan],
        device: torch.device,
        timeout_seconds: float,
        join_seconds: float,
    ) -> None:
        self._membership = membership
        # A store client serves one caller at a time, and others may wait on theirs for long.
        self._store = PrefixStore(
            f"adaptive_platform/{membership.generation}", membership.store.clone()
        )
        self._device = device
        deadline = Deadline(join_seconds)
        everyone = tuple(range(membership.world_size))
        self._built: dict[tuple[int, ...], Group] = {}
        try:
            self._meet(deadline)
            self._world: Group | None = self._build("world", 0, everyone, timeout_seconds, deadline)
            self._of_plan = [
                [self._join(phase, timeout_seconds, deadline) for phase in plan.phases]
                for plan in plans
            ]
        except BaseException:
            self.close(broken=True)
            raise

    @property
    def world(self) -> Group:
        """All workers."""
        assert self._world is not None, "used after close"
        return self._world

    @property
    def several_machines(self) -> bool:
        """True where the workers are known to be on more than one machine."""
        return len(set(self._membership.node_of_rank or ())) > 1

    def of_phase(self, plan: int, phase: int) -> Group | None:
        """This worker's group in a phase of the plan with that index; None where it has none."""
        return self._of_plan[plan][phase]

    def of_plan(self, plan: int) -> list[Group | None]:
        """This worker's groups in the plan with that index, phase by phase."""
        return self._of_plan[plan]

    def close(self, *, broken: bool = False) -> None:
        """Drop the connections; peers in the middle of an operation see it fail at once.

        Args:
            broken: An operation failed, so that an orderly goodbye is not possible.
        """
        for group in self._built.values():
            if self._device.type == "cuda":
                if broken:
                    group.backend.abort()
                else:
                    group.backend.shutdown()
        self._built.clear()
        self._world = None
        self._of_plan = []

    def roll_call(self, seconds: float) -> tuple[int, ...]:
        """After a failure: tell the others, and find out who does not answer within `seconds`."""
        others = [r for r in range(self._membership.world_size) if r != self._membership.rank]

        def ask() -> tuple[int, ...]:
            deadline, last_answer = Deadline(seconds), 0.0
            self._store.set(f"failed/{self._membership.rank}", "1")
            silent = others
            while silent and deadline.elapsed_seconds < seconds:
                left = [rank for rank in silent if not self._store.check([f"failed/{rank}"])]
                if len(left) < len(silent):
                    silent, last_answer = left, deadline.elapsed_seconds
                elif deadline.elapsed_seconds - last_answer > seconds / 4:
                    break  # failures spread in milliseconds; who is silent now stays silent
                time.sleep(0.02)
            return tuple(silent)

        try:
            return _bounded(ask, 1.1 * seconds)
        except (RuntimeError, TimeoutError):
            return ()  # the store is gone as well; the caller's own error stands

    def _meet(self, deadline: Deadline) -> None:
        rank, world_size = self._membership.rank, self._membership.world_size
        if self._store.add(f"joined/{rank}", 1) != 1:
            raise ValueError(
                f"worker {rank} has already made a reducer of generation "
                f"{self._membership.generation}: use a higher generation for the next one"
            )
        # Everyone must be there before anyone connects: torch's connection attempts to a worker
        # that left have a limit of their own, longer than ours.
        keys = [f"here/{other}" for other in range(world_size)]
        self._store.set(keys[rank], "1")
        try:
            self._store.wait(keys, deadline.remaining)
        except RuntimeError as error:
            missing = [other for other, key in enumerate(keys) if not self._store.check([key])]
            reason = f"they have not joined ({_first_line(error)})"
            raise LinkError("join", "world", missing, reason) from None

    def _join(self, phase: Phase, timeout_seconds: float, deadline: Deadline) -> Group | None:
        place = phase.place(self._membership.rank)
        if place is None:
            return None
        ranks = phase.groups[place[0]]
        return self._build(phase.axis.value, place[0], ranks, timeout_seconds, deadline)

    def _build(
        self,
        axis: str,
        index: int,
        ranks: tuple[int, ...],
        timeout_seconds: float,
        deadline: Deadline,
    ) -> Group:
        if ranks in self._built:
            return self._built[ranks]
        name = axis if axis == "world" else f"{axis} {index}"
        label = f"{name} (workers {_shown(ranks)})"
        store = PrefixStore(f"{axis}/{ranks[0]}-{len(ranks)}", self._store)
        position = ranks.index(self._membership.rank)
        make = _nccl if self._device.type == "cuda" else _gloo
        try:
            backend = _bounded(
                lambda: make(store, position, len(ranks), timeout_seconds),
                deadline.remaining_seconds,
            )
        except (RuntimeError, TimeoutError) as error:
            raise LinkError("connect", label, (), _first_line(error)) from None
        group = Group(label, ranks, backend)
        self._built[ranks] = group
        return group


def _gloo(store: Store, position: int, size: int, timeout_seconds: float) -> Any:
    return dist.ProcessGroupGloo(store, position, size, timedelta(seconds=timeout_seconds))


def _nccl(store: Store, position: int, size: int, timeout_seconds: float) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    # Ours is the first limit to pass: NCCL's own ends the process instead of the operation.
    options._timeout = timedelta(seconds=2 * timeout_seconds + 60)
    with _environment("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"):
        return dist.ProcessGroupNCCL(store, position, size, options)


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Set a variable while torch's constructor reads it; it takes this setting no other way."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _bounded(function: Callable[[], T], seconds: float) -> T:
    """Call `function` on a thread of its own and stop waiting for it after `seconds`."""
    results: list[T] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error.with_traceback(None))

    thread = threading.Thread(target=call, name="reducer-bounded", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no end after {seconds:.1f} s")
    return results[0]


def _shown(ranks: Sequence[int]) -> str:
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    shown = ", ".join(str(rank) for rank in ranks[:8])
    return shown if len(ranks) <= 8 else f"{shown}, ... ({len(ranks)} in all)"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
