"""Executes plans on CUDA tensors with NCCL's own collectives, on a stream beside the computation.

How a group does its part (ring, tree, halving) is NCCL's choice here; the plan decides the groups.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from adaptive_platform.collectives.deadline import Deadline
from adaptive_platform.collectives.executor import Executor
from adaptive_platform.collectives.failure import LinkError
from adaptive_platform.collectives.groups import ProcessGroups
from adaptive_platform.collectives.plan import Plan
from adaptive_platform.collectives.schedules import Op

__all__ = ["NcclExecutor"]


class NcclExecutor(Executor):
    """Executes one plan for one worker.

    `launch` queues a reduction and returns an event; the other methods also wait for their end.

    Args:
        plan: What `reduce` does.
        plan_index: Which of the plans of `groups` it is.
        groups: Connections for it.
        rank: This worker.
        device: Its GPU.
    """

    def __init__(
        self, plan: Plan, plan_index: int, groups: ProcessGroups, rank: int, device: torch.device
    ) -> None:
        self._plan = plan
        self._plan_index = plan_index
        self._groups = groups
        self._rank = rank
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._padded: dict[tuple[torch.dtype, int], torch.Tensor] = {}
        self._divisor = 1
        for phase in plan.phases:
            if phase.op is Op.REDUCE_SCATTER:
                self._divisor *= len(phase.groups[0])

    def launch(self, buffer: torch.Tensor) -> torch.cuda.Event:
        """Queue the sum of `buffer`; later work must wait for the event before it reads it."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        buffer.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            if buffer.numel() % self._divisor == 0:
                self._phases(buffer)
            else:
                padded = self._padded_like(buffer)
                padded[: buffer.numel()].copy_(buffer)
                padded[buffer.numel() :].zero_()
                self._phases(padded)
                buffer.copy_(padded[: buffer.numel()])
            event = torch.cuda.Event()
            event.record(self._stream)
        return event

    def await_event(self, event: torch.cuda.Event, operation: str, deadline: Deadline) -> None:
        """Wait on the host, with a limit, then order the current stream behind `event`.

        The host waits because a lost peer leaves the stream stuck for ever, and the optimizer must
        not be queued behind it. The price is one launch latency after the last bucket.
        """
        while not event.query():
            if deadline.remaining_seconds <= 0.001:
                raise LinkError(operation, self._groups.world.label, (), "time limit passed")
            time.sleep(0.0001)
        torch.cuda.current_stream(self._device).wait_event(event)

    def reduce(self, buffer: torch.Tensor, deadline: Deadline) -> None:
        """Launch and wait."""
        self.await_event(self.launch(buffer), "reduce", deadline)

    def all_reduce(self, tensor: torch.Tensor, deadline: Deadline) -> None:
        """NCCL's own, over the group of all workers."""
        self._run("all_reduce", tensor, deadline, self._sum_over_world)

    def broadcast(self, tensor: torch.Tensor, source: int, deadline: Deadline) -> None:
        """NCCL's own."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        backend = self._groups.world.backend
        self._run(
            "broadcast", tensor, deadline, lambda local: backend.broadcast([local], options).wait()
        )

    def all_gather(self, tensor: torch.Tensor, deadline: Deadline) -> list[torch.Tensor]:
        """NCCL's own."""
        world = self._groups.world
        on_device = tensor.to(self._device)
        found = [torch.empty_like(on_device) for _ in world.ranks]
        self._run(
            "all_gather",
            on_device,
            deadline,
            lambda local: world.backend.allgather([found], [local]).wait(),
        )
        return [each.to(tensor.device) for each in found]

    def barrier(self, deadline: Deadline) -> None:
        """A sum of nothing much: it returns when all have come."""
        token = torch.zeros(1, device=self._device)
        self._run("barrier", token, deadline, self._sum_over_world)

    def _sum_over_world(self, local: torch.Tensor) -> None:
        self._groups.world.backend.allreduce([local], dist.AllreduceOptions()).wait()

    def _run(
        self,
        operation: str,
        tensor: torch.Tensor,
        deadline: Deadline,
        call: Callable[[torch.Tensor], object],
    ) -> None:
        """Do `call` on our stream with the tensor on the GPU, wherever it lives."""
        if not tensor.numel():
            return
        local = tensor.to(self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            call(local)
            event = torch.cuda.Event()
            event.record(self._stream)
        self.await_event(event, operation, deadline)
        if local is not tensor:
            tensor.copy_(local)

    def _phases(self, buffer: torch.Tensor) -> None:
        spans = self._plan.spans(self._rank, buffer.numel())
        for index, (phase, span) in enumerate(zip(self._plan.phases, spans, strict=True)):
            group = self._groups.of_phase(self._plan_index, index)
            if group is None or span.length == 0:
                continue
            whole = buffer[span.start : span.stop]
            share = span.length // len(group.ranks)
            position = group.ranks.index(self._rank)
            own = whole[position * share : (position + 1) * share]
            if phase.op is Op.ALL_REDUCE:
                work = group.backend.allreduce([whole], dist.AllreduceOptions())
            elif phase.op is Op.REDUCE_SCATTER:
                work = group.backend._reduce_scatter_base(own, whole, dist.ReduceScatterOptions())
            elif phase.op is Op.ALL_GATHER:
                work = group.backend._allgather_base(whole, own)
            elif phase.op is Op.REDUCE:
                to_first = dist.ReduceOptions()
                to_first.rootRank, to_first.rootTensor = 0, 0
                work = group.backend.reduce([whole], to_first)
            else:
                from_first = dist.BroadcastOptions()
                from_first.rootRank, from_first.rootTensor = 0, 0
                work = group.backend.broadcast([whole], from_first)
            work.wait()  # orders our stream, does not hold the host

    def _padded_like(self, buffer: torch.Tensor) -> torch.Tensor:
        length = -(-buffer.numel() // self._divisor) * self._divisor
        key = (buffer.dtype, length)
        if key not in self._padded:
            self._padded[key] = torch.empty(length, dtype=buffer.dtype, device=self._device)
        return self._padded[key]
