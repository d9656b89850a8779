"""Executes plans on CUDA tensors with NCCL, on a stream beside the computation."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from adaptive_platform.collectives.deadline import Deadline
from adaptive_platform.collectives.executor import Executor
from adaptive_platform.collectives.failure import LinkError
from adaptive_platform.collectives.groups import ProcessGroups
from adaptive_platform.collectives.native import NativePhases
from adaptive_platform.collectives.plan import Plan, Span

__all__ = ["Launched", "NcclExecutor"]


@dataclass(frozen=True, slots=True)
class Launched:
    """An operation on the stream, between two events."""

    began: torch.cuda.Event
    ended: torch.cuda.Event


class NcclExecutor(Executor):
    """Executes one plan for one worker.

    `launch` queues a reduction and returns at once; the other methods also wait for their end.

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
        self._phases = NativePhases(plan, plan_index, groups, rank)
        self._groups = groups
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def launch(
        self,
        buffer: torch.Tensor,
        wire_dtype: torch.dtype,
        visit: Callable[[torch.Tensor], None] | None = None,
        *,
        halves: tuple[bool, ...] = (),
    ) -> Launched:
        """Queue the sum of `buffer`; wait for it before anything reads the buffer.

        NCCL adds in the type that it sends, so a narrower one also rounds the sums.

        Args:
            buffer: Whose sum.
            wire_dtype: Type between workers.
            visit: Queues work on this worker's shard, before the second of both `halves`.
            halves: Of a plan in halves: which to do, False for the first. Empty for all phases.

        Raises:
            LinkError: NCCL refused, since a communicator is broken.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        buffer.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            began = self._mark()
            for gathering in halves or (None,):
                if gathering and visit is not None:
                    span = self.shard(buffer.numel())
                    visit(buffer[span.start : span.stop])
                self._run_phases(buffer, wire_dtype, gathering)
            return Launched(began, self._mark())

    def _run_phases(
        self, buffer: torch.Tensor, wire_dtype: torch.dtype, gathering: bool | None
    ) -> None:
        phases = slice(None)
        if gathering is not None:
            middle = self._plan.first_half
            phases = slice(middle, None) if gathering else slice(middle)
        try:
            if wire_dtype is buffer.dtype:
                self._phases.run(buffer, phases)
            else:
                wire = buffer.to(wire_dtype)
                self._phases.run(wire, phases)
                buffer.copy_(wire)
        except RuntimeError as error:
            raise LinkError("reduce", self._groups.world.label, (), str(error)) from None

    def half(
        self,
        buffer: torch.Tensor,
        wire_dtype: torch.dtype,
        deadline: Deadline,
        *,
        gathering: bool,
    ) -> None:
        """Launch and wait."""
        launched = self.launch(buffer, wire_dtype, halves=(gathering,))
        self.await_launched(launched, "reduce", deadline)

    def shard(self, length: int) -> Span:
        """Equal chunks, but for the padding."""
        return self._phases.shard(length)

    def await_launched(self, launched: Launched, operation: str, deadline: Deadline) -> float:
        """Wait on the host, with a limit, then order the current stream behind the operation.

        The host waits because a lost peer leaves the stream stuck for ever, and the optimizer must
        not be queued behind it. The price is one launch latency after the last bucket.

        Returns:
            Seconds that the operation took on the GPU.
        """
        while not launched.ended.query():
            if deadline.passed:
                raise LinkError(operation, self._groups.world.label, (), "Timed out")
            time.sleep(0.0001)
        torch.cuda.current_stream(self._device).wait_event(launched.ended)
        return launched.began.elapsed_time(launched.ended) / 1000

    def reduce(self, buffer: torch.Tensor, wire_dtype: torch.dtype, deadline: Deadline) -> None:
        """Launch and wait."""
        self.await_launched(self.launch(buffer, wire_dtype), "reduce", deadline)

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
            began = self._mark()
            try:
                call(local)
            except RuntimeError as error:
                raise LinkError(operation, self._groups.world.label, (), str(error)) from None
            launched = Launched(began, self._mark())
        self.await_launched(launched, operation, deadline)
        if local is not tensor:
            tensor.copy_(local)

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event
