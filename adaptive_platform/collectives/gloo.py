"""Executes plans on CPU tensors with Gloo.

Gloo's all-reduce is good and is used as it is; its reduce-scatter and all-gather are not rings,
and a torus made of them is several times slower than one all-reduce. So those phases are pipelined
point-to-point messages: segments of a chunk, several in flight, added from preallocated scratch.

Where such phases surround an all-reduce (torus, hierarchical), a large buffer goes through in
slices: Gloo's own thread sums one slice between the rows while the next is summed along them.

With a narrower type on the wire, messages are cast as they leave and sums are kept in the buffer's
own type. Who sends a finished part also keeps the rounded values, so that all workers end with the
same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import pairwise

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from adaptive_platform.collectives.deadline import Deadline
from adaptive_platform.collectives.executor import Executor
from adaptive_platform.collectives.failure import LinkError
from adaptive_platform.collectives.groups import Group, ProcessGroups
from adaptive_platform.collectives.pipeline import Program, Step, compile_program
from adaptive_platform.collectives.plan import Phase, Plan
from adaptive_platform.collectives.schedules import Algorithm, Op, chunk_bounds, rounds_of

__all__ = ["GlooExecutor"]

_EXCHANGE_TAG = 2**20
"""Beyond the tags of any program."""


class GlooExecutor(Executor):
    """Executes one plan for one worker.

    Args:
        plan: What `reduce` does.
        plan_index: Which of the plans of `groups` it is.
        groups: Connections for it.
        rank: This worker.
        segment_bytes: Largest point-to-point message.
        num_slices: Parts of a large buffer that go through the phases one behind the other.
        in_flight: Receives posted ahead.
    """

    def __init__(
        self,
        plan: Plan,
        plan_index: int,
        groups: ProcessGroups,
        rank: int,
        segment_bytes: int,
        num_slices: int = 1,
        in_flight: int = 4,
    ) -> None:
        self._plan = plan
        self._plan_index = plan_index
        self._groups = groups
        self._rank = rank
        self._segment_bytes = segment_bytes
        self._num_slices = num_slices
        self._in_flight = in_flight
        self._native = [
            phase.op is Op.ALL_REDUCE and phase.algorithm is Algorithm.RING for phase in plan.phases
        ]
        self._scratch: dict[torch.dtype, list[torch.Tensor]] = {}
        self._casts: dict[torch.dtype, torch.Tensor] = {}
        # Nothing here may refer to this object: a cycle would keep the store's connection open
        # until the garbage collector comes by.
        self._spans = lru_cache(maxsize=256)(partial(plan.spans, rank))
        self._program = lru_cache(maxsize=256)(
            partial(_compile, plan, rank, segment_bytes, in_flight)
        )

    def reduce(self, buffer: torch.Tensor, wire_dtype: torch.dtype, deadline: Deadline) -> None:
        """Phase by phase; a phase without elements is left out by all its workers alike."""
        exact = wire_dtype is buffer.dtype
        middle = self._native.index(True) if exact and True in self._native else None
        if middle is None:
            self._phases(range(len(self._native)), buffer, wire_dtype, deadline)
            return
        slices = self._slices(buffer)
        sums: list[_Sum | None] = []
        for part in slices:
            self._phases(range(middle), part, wire_dtype, deadline)
            sums.append(self._begin_phase_sum(middle, part, deadline))
        for part, under_way in zip(slices, sums, strict=True):
            if under_way is not None:
                under_way.wait()
            self._phases(range(middle + 1, len(self._native)), part, wire_dtype, deadline)

    def _slices(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Parts that can overlap; the buffer itself where there is nothing to overlap with."""
        if len(self._native) == 1:
            return [buffer]
        # Shorter messages would cost more than the overlap brings. It brings more where phases
        # use different wires than on one machine, where they share its memory.
        shortest = self._segment_bytes // (4 if self._groups.several_machines else 2)
        largest_group = max(len(group) for group in self._plan.phases[0].groups)
        smallest_slice_bytes = shortest * largest_group
        count = max(1, min(self._num_slices, buffer.nbytes // smallest_slice_bytes))
        bounds = chunk_bounds(0, buffer.numel(), count)
        return [buffer[start:stop] for start, stop in pairwise(bounds)]

    def _phases(
        self, indices: range, part: torch.Tensor, wire_dtype: torch.dtype, deadline: Deadline
    ) -> None:
        """Some phases of one slice, by messages."""
        for index in indices:
            group = self._groups.of_phase(self._plan_index, index)
            if group is None or self._spans(part.numel())[index].length == 0:
                continue
            program = self._program(index, part.numel(), wire_dtype.itemsize)
            self._follow(program, self._plan.phases[index], group, part, wire_dtype, deadline)

    def _begin_phase_sum(self, index: int, part: torch.Tensor, deadline: Deadline) -> _Sum | None:
        """Gloo's own sum for this worker's group of a phase, where it has one."""
        group, span = self._groups.of_phase(self._plan_index, index), self._spans(part.numel())
        if group is None or span[index].length == 0:
            return None
        return _Sum(part[span[index].start : span[index].stop], group, deadline)

    def all_reduce(self, tensor: torch.Tensor, deadline: Deadline) -> None:
        """Gloo's own, over the group of all workers."""
        if tensor.numel():
            _Sum(tensor.view(-1), self._groups.world, deadline).wait()

    def broadcast(self, tensor: torch.Tensor, source: int, deadline: Deadline) -> None:
        """Gloo's own, as bytes, so that every type of element works."""
        if not tensor.numel():
            return
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = source, 0, deadline.remaining
        world = self._groups.world
        try:
            world.backend.broadcast([_as_bytes(tensor)], options).wait()
        except RuntimeError as error:
            raise LinkError("broadcast", world.label, (), str(error)) from None

    def all_gather(self, tensor: torch.Tensor, deadline: Deadline) -> list[torch.Tensor]:
        """Gloo's own, as bytes."""
        world = self._groups.world
        found = [torch.empty_like(tensor) for _ in world.ranks]
        if not tensor.numel():
            return found
        options = AllgatherOptions()
        options.timeout = deadline.remaining
        try:
            world.backend.allgather(
                [[_as_bytes(each) for each in found]], [_as_bytes(tensor)], options
            ).wait()
        except RuntimeError as error:
            raise LinkError("all_gather", world.label, (), str(error)) from None
        return found

    def exchange(
        self,
        tensor: torch.Tensor,
        to: Sequence[int],
        sources: Sequence[int],
        deadline: Deadline,
    ) -> list[torch.Tensor]:
        """Point to point; all messages are under way at once."""
        world = self._groups.world
        found = [torch.empty_like(tensor) for _ in sources]
        peers = [*sources, *to]
        works: list[dist.Work] = []
        waited = 0
        try:
            for part, peer in zip(found, sources, strict=True):
                works.append(world.backend.recv([_as_bytes(part)], peer, _EXCHANGE_TAG))
            works += [world.backend.send([_as_bytes(tensor)], peer, _EXCHANGE_TAG) for peer in to]
            for work in works:
                work.wait(deadline.remaining)
                waited += 1
        except RuntimeError as error:
            named = peers[waited : waited + 1]
            raise LinkError("exchange", world.label, tuple(named), str(error)) from None
        return found

    def barrier(self, deadline: Deadline) -> None:
        """A sum of nothing much: it returns when all have come."""
        _Sum(torch.zeros(1), self._groups.world, deadline, "barrier").wait()

    def _follow(
        self,
        program: Program,
        phase: Phase,
        group: Group,
        buffer: torch.Tensor,
        wire_dtype: torch.dtype,
        deadline: Deadline,
    ) -> None:
        backend, slots = group.backend, self._slots(wire_dtype, program)
        # A part is cast again only when it came back changed, and then its first send has ended,
        # or when it is final, and then the same bytes are written once more.
        exact = wire_dtype is buffer.dtype
        wire = buffer if exact else self._cast(wire_dtype, buffer.numel())
        outgoing: dict[int, dist.Work] = {}
        incoming: dict[int, tuple[dist.Work, torch.Tensor]] = {}
        peer = 0
        try:
            for action in program.actions:
                index = action.index
                if action.step is Step.SEND:
                    message = program.sends[index]
                    peer = message.peer
                    part = wire[message.start : message.stop]
                    if not exact:
                        own = buffer[message.start : message.stop]
                        part.copy_(own)
                        if not message.add:
                            own.copy_(part)
                    outgoing[index] = backend.send([part], peer, message.tag)
                elif action.step is Step.RECEIVE:
                    message = program.receives[index]
                    peer = message.peer
                    if message.add or not exact:
                        part = slots[index % program.in_flight][: message.stop - message.start]
                    else:
                        part = buffer[message.start : message.stop]
                    incoming[index] = (backend.recv([part], peer, message.tag), part)
                elif action.step is Step.AWAIT_RECEIVED:
                    message = program.receives[index]
                    peer = message.peer
                    work, part = incoming.pop(index)
                    work.wait(deadline.remaining)
                    if message.add:
                        buffer[message.start : message.stop].add_(part)
                    elif not exact:
                        buffer[message.start : message.stop].copy_(part)
                else:
                    peer = program.sends[index].peer
                    outgoing.pop(index).wait(deadline.remaining)
        except RuntimeError as error:
            raise LinkError(phase.op.value, group.label, (group.ranks[peer],), str(error)) from None

    def _slots(self, dtype: torch.dtype, program: Program) -> list[torch.Tensor]:
        """Memory that arriving summands wait in; grows to the largest program and is kept."""
        slots = self._scratch.get(dtype)
        if slots is None or slots[0].numel() < program.slot_length:
            slots = [torch.empty(program.slot_length, dtype=dtype) for _ in range(self._in_flight)]
            self._scratch[dtype] = slots
        return slots

    def _cast(self, dtype: torch.dtype, length: int) -> torch.Tensor:
        """Memory that outgoing messages are cast to; kept like the slots."""
        memory = self._casts.get(dtype)
        if memory is None or memory.numel() < length:
            memory = self._casts[dtype] = torch.empty(length, dtype=dtype)
        return memory


def _compile(
    plan: Plan,
    rank: int,
    segment_bytes: int,
    in_flight: int,
    index: int,
    length: int,
    itemsize: int,
) -> Program:
    """What `rank` does in phase `index` for a buffer of `length` elements."""
    phase, span = plan.phases[index], plan.spans(rank, length)[index]
    place = phase.place(rank)
    assert place is not None
    size = len(phase.groups[place[0]])
    return compile_program(
        rounds_of(phase.op, phase.algorithm, size, place[1]),
        chunk_bounds(span.start, span.stop, size),
        max(1, segment_bytes // itemsize),
        in_flight,
    )


class _Sum:
    """Gloo's own all-reduce, under way on one of Gloo's threads."""

    def __init__(
        self, tensor: torch.Tensor, group: Group, deadline: Deadline, name: str = "all_reduce"
    ) -> None:
        self._group, self._name = group, name
        options = dist.AllreduceOptions()
        options.timeout = deadline.remaining
        try:
            self._work = group.backend.allreduce([tensor], options)
        except RuntimeError as error:
            raise LinkError(name, group.label, (), str(error)) from None

    def wait(self) -> None:
        """Return when it is done."""
        try:
            self._work.wait()
        except RuntimeError as error:
            raise LinkError(self._name, self._group.label, (), str(error)) from None


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
