"""Carries out a plan's phases with the backend's own collectives: what suits NCCL.

How a group does its part (ring, tree, halving) is then the backend's choice; the plan decides who
is in which group and on which part of the buffer.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from adaptive_platform.collectives.groups import Group, ProcessGroups
from adaptive_platform.collectives.plan import Plan, Span
from adaptive_platform.collectives.schedules import Op

__all__ = ["NativePhases"]


class NativePhases:
    """Queues the collectives of one plan for one worker.

    Args:
        plan: What to do.
        plan_index: Which of the plans of `groups` it is.
        groups: Connections for it.
        rank: This worker.
    """

    def __init__(self, plan: Plan, plan_index: int, groups: ProcessGroups, rank: int) -> None:
        self._plan = plan
        self._plan_index = plan_index
        self._groups = groups
        self._rank = rank
        self._padded: dict[tuple[torch.dtype, int], torch.Tensor] = {}
        self._divisor = 1
        for phase in plan.phases:
            if phase.op is Op.REDUCE_SCATTER:
                self._divisor *= len(phase.groups[0])

    def run(self, buffer: torch.Tensor, phases: slice = slice(None)) -> None:
        """Sum `buffer` over all workers, in place.

        Collectives want equal chunks, so a length that does not divide is padded with zeros in
        scratch memory, kept for the next time.

        Args:
            buffer: 1-D.
            phases: Which of the phases to do; all, unless given.
        """
        if buffer.numel() % self._divisor == 0:
            self._phases(buffer, phases)
            return
        length = self._padded_length(buffer.numel())
        key = (buffer.dtype, length)
        if key not in self._padded:
            self._padded[key] = buffer.new_empty(length)
        padded = self._padded[key]
        padded[: buffer.numel()].copy_(buffer)
        padded[buffer.numel() :].zero_()
        self._phases(padded, phases)
        buffer.copy_(padded[: buffer.numel()])

    def shard(self, length: int) -> Span:
        """What this worker owns between the halves: equal chunks, but for the padding."""
        span = self._plan.shard(self._rank, self._padded_length(length))
        return Span(min(span.start, length), min(span.stop, length))

    def _padded_length(self, length: int) -> int:
        return -(-length // self._divisor) * self._divisor

    def _phases(self, buffer: torch.Tensor, phases: slice) -> None:
        spans = self._plan.spans(self._rank, buffer.numel())
        steps = list(enumerate(zip(self._plan.phases, spans, strict=True)))
        for index, (phase, span) in steps[phases]:
            group = self._groups.of_phase(self._plan_index, index)
            if group is not None and span.length:
                self._collective(phase.op, group, buffer[span.start : span.stop])

    def _collective(self, op: Op, group: Group, whole: torch.Tensor) -> None:
        share = whole.numel() // len(group.ranks)
        position = group.ranks.index(self._rank)
        own = whole[position * share : (position + 1) * share]
        if op is Op.ALL_REDUCE:
            work = group.backend.allreduce([whole], dist.AllreduceOptions())
        elif op is Op.REDUCE_SCATTER:
            work = group.backend._reduce_scatter_base(own, whole, dist.ReduceScatterOptions())
        elif op is Op.ALL_GATHER:
            work = group.backend._allgather_base(whole, own)
        elif op is Op.REDUCE:
            to_first = dist.ReduceOptions()
            to_first.rootRank, to_first.rootTensor = 0, 0
            work = group.backend.reduce([whole], to_first)
        else:
            from_first = dist.BroadcastOptions()
            from_first.rootRank, from_first.rootTensor = 0, 0
            work = group.backend.broadcast([whole], from_first)
        work.wait()  # with NCCL this orders the stream and does not hold the host
