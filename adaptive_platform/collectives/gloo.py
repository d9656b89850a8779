"""Executes plans on CPU tensors with Gloo.

Gloo's all-reduce is good and is used as it is; its reduce-scatter and all-gather are not rings,
and a torus made of them is several times slower than one all-reduce. So those phases are pipelined
point-to-point messages: segments of a chunk, several in flight, added from preallocated scratch.

Where such phases surround an all-reduce (torus, hierarchical), a large buffer goes through in
slices: Gloo's own thread sums one slice between the rows while the next is summed along them. On
one machine both would share its memory and processor, so there all phases are our own messages, few
and long; and a short buffer is not worth a hand-over to that thread anywhere.

Between two workers messages to the higher rank go through the phase's group, those to the lower
through the group of all. Gloo's thread can't read from a connection while ours writes to it: it
asks again and again until then, which takes up to a third of a reduction's processor time.

With a narrower type on the wire, messages are cast as they leave and sums are kept in the buffer's
own type. Who sends a finished part also keeps the rounded values, so that all workers end with the
same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from adaptive_platform.collectives.deadline import Deadline
from adaptive_platform.collectives.executor import Executor
from adaptive_platform.collectives.failure import LinkError
from adaptive_platform.collectives.groups import Group, ProcessGroups
from adaptive_platform.collectives.plan import Plan, Span
from adaptive_platform.collectives.script import Act, Script, native_phase, write_script

__all__ = ["GlooExecutor"]

_EXCHANGE_TAG = 2**28
"""Beyond the tags of any script, with the phase that is added to them."""
_LONGER = 4
"""On one machine messages may be as many times longer."""


class GlooExecutor(Executor):
    """Executes one plan for one worker.

    Args:
        plan: What `reduce` does.
        plan_index: Which of the plans of `groups` it is.
        groups: Connections for it.
        rank: This worker.
        segment_bytes: Largest point-to-point message between machines.
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
        self._native = native_phase(plan)
        self._scratch: dict[torch.dtype, list[torch.Tensor]] = {}
        self._casts: dict[torch.dtype, torch.Tensor] = {}
        # Nothing here may refer to this object: a cycle would keep the store's connection open
        # until the garbage collector comes by.
        self._script = lru_cache(maxsize=256)(partial(write_script, plan, rank))

    def reduce(self, buffer: torch.Tensor, wire_dtype: torch.dtype, deadline: Deadline) -> None:
        """Follow the script for a buffer of this length."""
        script = self._script(
            buffer.numel(),
            segment=self._segment(wire_dtype),
            in_flight=self._in_flight,
            num_slices=self._slices(buffer.nbytes),
            native=self._hands_over(buffer.nbytes),
            exact=wire_dtype is buffer.dtype,
        )
        self._follow(script, buffer, wire_dtype, deadline)

    def half(
        self,
        buffer: torch.Tensor,
        wire_dtype: torch.dtype,
        deadline: Deadline,
        *,
        gathering: bool,
    ) -> None:
        """Follow the script of that half."""
        middle, last = self._plan.first_half, len(self._plan.phases)
        script = self._script(
            buffer.numel(),
            segment=self._segment(wire_dtype),
            in_flight=self._in_flight,
            exact=wire_dtype is buffer.dtype,
            phases=(middle, last) if gathering else (0, middle),
        )
        self._follow(script, buffer, wire_dtype, deadline)

    def shard(self, length: int) -> Span:
        """As the plan has it."""
        return self._plan.shard(self._rank, length)

    def _segment(self, wire_dtype: torch.dtype) -> int:
        """Elements of the longest message."""
        longer = 1 if self._groups.several_machines else _LONGER
        return max(1, longer * self._segment_bytes // wire_dtype.itemsize)

    def _hands_over(self, num_bytes: int) -> bool:
        """Whether Gloo's own thread sums a phase that is an all-reduce."""
        if len(self._plan.phases) == 1:
            return True
        return self._groups.several_machines and num_bytes > self._segment_bytes

    def _slices(self, num_bytes: int) -> int:
        """Parts that can overlap; one where there is nothing to overlap with."""
        if self._native is None or len(self._plan.phases) == 1 or not self._hands_over(num_bytes):
            return 1
        # Shorter shares, which is what travels between rows, cost more than the overlap brings.
        shortest = self._segment_bytes // 8 * self._plan.world_size
        return max(1, min(self._num_slices, num_bytes // shortest))

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
        self, script: Script, buffer: torch.Tensor, wire_dtype: torch.dtype, deadline: Deadline
    ) -> None:
        exact = wire_dtype is buffer.dtype
        # A part is cast again only when it came back changed, and then its first send has ended,
        # or when it is final, and then the same bytes are written once more.
        wire = buffer if exact else self._cast(wire_dtype, buffer.numel())
        slots = self._slots(wire_dtype, script.slot_length)
        groups = cast(list[Group], self._groups.of_plan(self._plan_index))  # none is named in vain
        works: list[Any] = [None] * script.num_works
        phase = peer = 0
        try:
            for act, phase, start, stop, work, peer, tag, slot, final in script.instructions:
                if act is Act.RECEIVE:
                    part = buffer[start:stop] if slot < 0 else slots[slot][: stop - start]
                    way = self._way(groups[phase], phase, peer, tag, leaving=False)
                    works[work] = way.backend.recv([part], way.peer, way.tag)
                elif act is Act.SEND:
                    part = wire[start:stop]
                    if not exact:
                        own = buffer[start:stop]
                        part.copy_(own)
                        if final:
                            own.copy_(part)
                    way = self._way(groups[phase], phase, peer, tag, leaving=True)
                    works[work] = way.backend.send([part], way.peer, way.tag)
                elif act is Act.BEGIN_SUM:
                    works[work] = _Sum(buffer[start:stop], groups[phase], deadline)
                elif act is Act.AWAIT_SUM:
                    works[work].wait()
                else:
                    works[work].wait(deadline.remaining)
                    works[work] = None
                    if act is Act.ADD_RECEIVED:
                        buffer[start:stop].add_(slots[slot][: stop - start])
                    elif slot >= 0 and act is Act.AWAIT_RECEIVED:
                        buffer[start:stop].copy_(slots[slot][: stop - start])
        except LinkError:
            raise
        except RuntimeError as error:
            name, group = self._plan.phases[phase].op.value, groups[phase]
            raise LinkError(name, group.label, (group.ranks[peer],), str(error)) from None

    def _way(self, group: Group, phase: int, peer: int, tag: int, *, leaving: bool) -> _Way:
        """Where a message goes along: up through the phase's group, down through that of all."""
        other = group.ranks[peer]
        if leaving == (other > self._rank):
            return _Way(group.backend, peer, tag)
        # Groups of several phases meet here, and each counts its own tags.
        return _Way(self._groups.world.backend, other, tag * len(self._plan.phases) + phase)

    def _slots(self, dtype: torch.dtype, length: int) -> list[torch.Tensor]:
        """Memory that arriving summands wait in; grows to the longest message and is kept."""
        slots = self._scratch.get(dtype)
        if slots is None or slots[0].numel() < length:
            slots = [torch.empty(length, dtype=dtype) for _ in range(self._in_flight)]
            self._scratch[dtype] = slots
        return slots

    def _cast(self, dtype: torch.dtype, length: int) -> torch.Tensor:
        """Memory that outgoing messages are cast to; kept like the slots."""
        memory = self._casts.get(dtype)
        if memory is None or memory.numel() < length:
            memory = self._casts[dtype] = torch.empty(length, dtype=dtype)
        return memory


class _Way(NamedTuple):
    """A connection to one worker, as a backend knows it."""

    backend: Any
    peer: int
    tag: int


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
