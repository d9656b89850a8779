"""What a reduction will do, as data: phases over disjoint groups of workers, and their configs.

A plan needs no process. `simulate` executes one on plain vectors, `cost` prices one, and a
`Reducer` executes one on process groups; all three read the same rounds from `schedules`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

import torch
from pydantic import Field

from adaptive_platform.collectives.schedules import (
    Algorithm,
    Op,
    chunk_bounds,
    piece_bounds,
    rounds_of,
)
from adaptive_platform.collectives.sparse_config import SparseConfig
from adaptive_platform.settings import Variant

__all__ = [
    "Axis",
    "MessagesConfig",
    "Phase",
    "Plan",
    "PlanTable",
    "ReducerConfig",
    "Span",
    "whole_world",
]

Groups = tuple[tuple[int, ...], ...]

_GATHERING = (Op.ALL_GATHER, Op.BROADCAST)
"""Operations that add nothing up."""


class Axis(str, Enum):
    """What the groups of a phase are called in messages and logs."""

    WORLD = "world"
    ROW = "row"
    COLUMN = "column"
    NODE = "node"
    PAIR = "pair"
    CORE = "core"
    MASTERS = "masters"


@dataclass(frozen=True, slots=True)
class Span:
    """Elements `[start, stop)` of the buffer."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        """Number of elements."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Phase:
    """One operation that several disjoint groups of workers do side by side.

    Reduce-scatter leaves the worker at position i of its group with chunk i of what the group
    held; all-gather undoes it. Reduce and broadcast have position 0 as their root. Workers in no
    group wait.
    """

    op: Op
    axis: Axis
    groups: Groups
    """Ranks, in the order of the ring."""
    algorithm: Algorithm = Algorithm.RING

    def __post_init__(self) -> None:
        members = [rank for group in self.groups for rank in group]
        if len(set(members)) != len(members):
            raise ValueError(f"{self.axis.value} groups share workers: {self.groups}")
        if any(len(group) < 2 for group in self.groups):
            raise ValueError(f"a {self.axis.value} group needs two workers: {self.groups}")

    def place(self, rank: int) -> tuple[int, int] | None:
        """Index of the rank's group and its position there; None when it is in none."""
        for index, group in enumerate(self.groups):
            if rank in group:
                return index, group.index(rank)
        return None


@dataclass(frozen=True, slots=True)
class Plan:
    """An all-reduce (sum) over `world_size` workers.

    Attributes:
        name: The `kind` of the config that made it.
        grid: (rows Y, row length X) of a torus; (1, world_size) for plans without a grid.
    """

    name: str
    world_size: int
    grid: tuple[int, int]
    phases: tuple[Phase, ...]

    def __post_init__(self) -> None:
        scattered: list[Groups] = []
        for phase in self.phases:
            if any(not 0 <= rank < self.world_size for group in phase.groups for rank in group):
                raise ValueError(f"a phase names workers beyond {self.world_size}: {phase.groups}")
            if phase.op is Op.REDUCE_SCATTER:
                scattered.append(phase.groups)
            elif phase.op is Op.ALL_GATHER and (not scattered or scattered.pop() != phase.groups):
                raise ValueError("an all-gather must undo the latest reduce-scatter")
        if scattered:
            raise ValueError("a reduce-scatter is never gathered")

    def spans(self, rank: int, length: int) -> tuple[Span, ...]:
        """The part of a buffer of `length` elements that `rank` works on, phase by phase.

        Chunks differ by at most one element where the length does not divide, so no padding is
        needed and no element is sent twice.
        """
        held = [Span(0, length)]
        spans: list[Span] = []
        for phase in self.phases:
            place = phase.place(rank)
            if place is None:
                spans.append(Span(0, 0))
                continue
            if phase.op is Op.ALL_GATHER:
                held.pop()
            span = held[-1]
            spans.append(span)
            if phase.op is Op.REDUCE_SCATTER:
                index, position = place
                bounds = chunk_bounds(span.start, span.stop, len(phase.groups[index]))
                held.append(Span(bounds[position], bounds[position + 1]))
        return tuple(spans)

    def in_halves(self) -> Plan:
        """The same sum with a moment in between at which every element has one owner.

        An all-reduce becomes the reduce-scatter and the all-gather that it is made of, with the
        same messages; plans that reduce and broadcast have that moment already.
        """
        phases: list[Phase] = []
        gathers: list[Phase] = []
        for phase in self.phases:
            if phase.op is Op.ALL_REDUCE:
                phases.append(replace(phase, op=Op.REDUCE_SCATTER))
                gathers.append(replace(phase, op=Op.ALL_GATHER))
            elif phase.op in _GATHERING:
                gathers.append(phase)
            else:
                phases.append(phase)
        return replace(self, phases=(*phases, *gathers))

    @property
    def first_half(self) -> int:
        """Number of phases up to the moment between: those behind only spread what is summed."""
        return sum(phase.op not in _GATHERING for phase in self.phases)

    def shard(self, rank: int, length: int) -> Span:
        """What `rank` owns after the first half; the shards of all ranks make up the buffer.

        Raises:
            ValueError: The plan has an all-reduce, after which everyone owns everything.
        """
        held = Span(0, length)
        for phase in self.phases[: self.first_half]:
            if phase.op is Op.ALL_REDUCE:
                raise ValueError(f"{self.name}: only a plan in halves has shards")
            place = phase.place(rank)
            if place is None:
                continue
            index, position = place
            if phase.op is Op.REDUCE_SCATTER:
                bounds = chunk_bounds(held.start, held.stop, len(phase.groups[index]))
                held = Span(bounds[position], bounds[position + 1])
            elif position:
                held = Span(0, 0)
        return held

    def elements_sent(self, rank: int, length: int, phases: slice = slice(None)) -> int:
        """Elements that `rank` puts on the wire for one buffer of `length` elements.

        Args:
            rank: Whose.
            length: Elements of the buffer.
            phases: Which of the phases count; all, unless given.
        """
        total = 0
        pairs = list(zip(self.phases, self.spans(rank, length), strict=True))
        for phase, span in pairs[phases]:
            place = phase.place(rank)
            if place is None or not span.length:
                continue
            size = len(phase.groups[place[0]])
            bounds = piece_bounds(phase.algorithm, span.start, span.stop, size)
            for turn in rounds_of(phase.op, phase.algorithm, size, place[1]):
                if turn.send is not None:
                    total += bounds[turn.send.stop] - bounds[turn.send.start]
        return total

    def describe(self) -> str:
        """One line for logs, such as `torus 2 x 4: reduce_scatter row, all_reduce column, ...`."""
        grid = f" {self.grid[0]} x {self.grid[1]}" if self.grid[0] > 1 else ""
        steps = ", ".join(f"{phase.op.value} {phase.axis.value}" for phase in self.phases)
        return f"{self.name}{grid} over {self.world_size} workers: {steps or 'nothing to send'}"


PlanTable = tuple[tuple[float, Plan], ...]
"""Limits in bytes, ascending, and the plan for messages up to there."""


class ReducerConfig(Variant):
    """How gradients are summed over the workers."""

    bucket_mib: float = Field(25.0, gt=0)
    """Size in MiB at which a gradient bucket is closed: the threshold of fusion (Sun et al. 2019,
    1902.06855, and Jia et al. 2018, 1807.11205). A bucket is reduced once backward has filled it;
    which gradients share one never changes."""
    lazy_kib: float = Field(1024.0, ge=0)
    """With Gloo, reductions that are shorter wait until they come to this together, in KiB, or
    until somebody waits for them: to hand one over costs more than the message. 0: at once."""
    timeout_seconds: float = Field(30.0, gt=0)
    """Longest time one operation waits for another worker, its slowness included, in seconds."""
    wire_dtype: Literal["bfloat16", "float16"] | None = None
    """Type of gradients between workers. Half the bytes, and gradients rounded to 8 (bfloat16) or
    11 bits (float16, which loses what is below 6e-8) wherever a sum passes; sums are kept in
    single precision with Gloo, not with NCCL. What is sent is divided by the global batch before.
    Counts, votes and statistics of a step travel apart and exact, for one short message more.
    Nothing: the gradients' own type, exact."""

    sparse: SparseConfig | None = None
    """Send only the chunks that matter, with momentum correction; needs sgd or lars with
    momentum = 0, and goes without measured noise. Nothing: everything travels."""

    @property
    def wire(self) -> torch.dtype | None:
        """`wire_dtype` as torch has it."""
        return None if self.wire_dtype is None else getattr(torch, self.wire_dtype)

    @property
    def segment_bytes(self) -> int:
        """Largest point-to-point message, for plans that send any."""
        return 4 * 2**20

    @property
    def num_slices(self) -> int:
        """Parts of a large buffer that go through the phases one behind the other, with Gloo."""
        return 1

    def plans(self, world_size: int, node_of_rank: Sequence[str] | None = None) -> PlanTable:
        """Which plan serves which message: one for all, unless a variant tells sizes apart.

        Returns:
            Pairs of a limit and a plan, limits ascending and the last one infinite; the first
            limit that is at least the size of a message in bytes decides.
        """
        return ((math.inf, self.plan(world_size, node_of_rank)),)

    def plan(self, world_size: int, node_of_rank: Sequence[str] | None = None) -> Plan:
        """The plan for `world_size` workers; that of the largest messages where there are several.

        Args:
            world_size: Number of workers, at least 1.
            node_of_rank: Name of the machine of each rank, where known.

        Raises:
            UserError: This choice cannot work with that many workers.
        """
        raise TypeError(f"{type(self).__name__} has no plan: use one of its variants")


class MessagesConfig(ReducerConfig):
    """A reduction made of our own point-to-point messages (with Gloo; NCCL has its own)."""

    segment_kib: int = Field(4096, ge=4)
    """Largest message in KiB between machines, with Gloo; smaller overlaps better, larger wakes
    threads less often. On one machine, where there is nothing to overlap with, messages are up to
    four times as long. Scratch memory is up to four messages."""
    slices: int = Field(8, ge=1)
    """Parts of a large buffer that go through the phases one behind the other, with Gloo: one is
    summed between machines while the next is summed inside them. Fewer where a worker's share
    would become shorter than an eighth of `segment_kib`, and one on one machine. A buffer that is
    no longer than `segment_kib` is never handed to Gloo's own thread, nor any on one machine."""

    @property
    def segment_bytes(self) -> int:
        """Largest point-to-point message."""
        return self.segment_kib * 1024

    @property
    def num_slices(self) -> int:
        """Parts that go through the phases one behind the other."""
        return self.slices


def whole_world(
    op: Op, world_size: int, algorithm: Algorithm = Algorithm.RING
) -> tuple[Phase, ...]:
    """One phase in which all workers form one group; none for a worker alone."""
    everyone = (tuple(range(world_size)),)
    return (Phase(op, Axis.WORLD, everyone, algorithm),) if world_size > 1 else ()
