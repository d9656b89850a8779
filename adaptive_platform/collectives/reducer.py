"""Sums buffers over all workers, asynchronously and in call order; the room's front door."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Sequence
from functools import lru_cache
from types import TracebackType
from typing import Any

import torch

from adaptive_platform.collectives.channel import Channel
from adaptive_platform.collectives.deadline import Deadline
from adaptive_platform.collectives.executor import Executor
from adaptive_platform.collectives.groups import Membership
from adaptive_platform.collectives.nccl import NcclExecutor
from adaptive_platform.collectives.ordered import Finished, Pending
from adaptive_platform.collectives.plan import Plan, ReducerConfig, Span

__all__ = ["Reducer"]


class Reducer:
    """All that workers say to each other while one membership lasts.

    Every worker makes the same calls in the same order. Results are the same bits on all of them.
    One worker alone needs no group, no thread and no copy.

    After a `CollectiveError` the groups are closed, so that peers in the middle of an operation
    notice at once, and every later call raises the same error. Close it and make a new one with
    the survivors and a higher generation.

    Args:
        config: How buffers are summed.
        membership: Who takes part.
        device: Where buffers live; decides between Gloo (CPU) and NCCL (CUDA).
        join_seconds: Longest time until all workers are connected; the config's limit where None.
        roll_call: After a failure, ask who is still there, to name the lost ones in the error. It
            costs a fraction of a second.

    Raises:
        CollectiveError: A worker did not join within the time limit.
        UserError: The config cannot work with that many workers.
        ValueError: This worker already has a reducer of this generation.
    """

    def __init__(
        self,
        config: ReducerConfig,
        membership: Membership,
        device: torch.device | str = "cpu",
        *,
        join_seconds: float | None = None,
        roll_call: bool = True,
    ) -> None:
        self._config = config
        self._membership = membership
        self._device = torch.device(device)
        self._plans = config.plans(membership.world_size, membership.node_of_rank)
        self._bytes_sent = 0
        plans, rank = self._plans, membership.rank
        # In halves, the plan of the largest has the groups that it has anyway.
        halves = plans[-1][1].in_halves()
        middle = halves.first_half
        self._half_sent = lru_cache(maxsize=256)(
            lambda length, gathering: halves.elements_sent(
                rank, length, slice(middle, None) if gathering else slice(middle)
            )
        )
        self._elements_sent = lru_cache(maxsize=256)(
            lambda index, length: plans[index][1].elements_sent(rank, length)
        )
        self._channel = Channel(
            config,
            membership,
            self._device,
            [*(plan for _, plan in plans), halves],
            join_seconds or config.timeout_seconds,
            roll_call=roll_call,
        )
        self._halves = self._channel.executors[-1] if self._channel.executors else None

    @property
    def rank(self) -> int:
        """This worker, from 0."""
        return self._membership.rank

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return self._membership.world_size

    @property
    def device(self) -> torch.device:
        """Where buffers live."""
        return self._device

    @property
    def plan(self) -> Plan:
        """What `start` does with the largest buffers."""
        return self._plans[-1][1]

    def plan_for(self, message_bytes: int) -> Plan:
        """What `start` does with a buffer of that many bytes."""
        return self._plans[self._index_for(message_bytes)][1]

    def describe(self) -> str:
        """One line for logs: which plan serves which sizes, and what is narrower on the wire."""
        parts = [
            plan.describe()
            if math.isinf(limit)
            else f"up to {limit / 1024:g} KiB {plan.describe()}"
            for limit, plan in self._plans
        ]
        wire = self._config.wire_dtype
        return "; above ".join(parts) + (f"; as {wire} between workers" if wire else "")

    @property
    def seconds(self) -> float:
        """Time spent in `start`ed reductions so far, whether or not anyone waited for it."""
        return self._channel.seconds

    @property
    def bytes_sent(self) -> int:
        """Bytes this worker put on the wire, by the plan; small sums as a ring would send them."""
        return self._bytes_sent

    def start(
        self,
        buffer: torch.Tensor,
        wire_dtype: torch.dtype | None = None,
        *,
        visit: Callable[[torch.Tensor], None] | None = None,
    ) -> Pending:
        """Begin to sum `buffer` over all workers, in place.

        Args:
            buffer: 1-D, contiguous, float32, float64, float16 or bfloat16, of any length that is
                the same on all workers. Leave it alone until `wait` has returned. With Gloo, short
                ones are put off until someone waits, or until they are `lazy_kib` together (lazy
                all-reduce, Sun et al. 2019, 1902.06855): they cost less than to be handed over.
            wire_dtype: Type of its numbers between workers, such as `torch.bfloat16`; left out,
                its own. With Gloo, sums are kept in the buffer's type all the same. Divide before
                rather than after where a sum might not fit, and keep what must be exact, such as
                counts, out of such a buffer.
            visit: Changes this worker's `shard` of the sum in place before it goes to the others;
                called behind the caller's back. With it the plan of the largest buffers is used.

        Returns:
            The operation; `wait` for it before reading the buffer.

        Raises:
            CollectiveError: An earlier operation failed.
            ValueError: Not a 1-D contiguous floating-point tensor, or `wire_dtype` is wider.
        """
        if visit is not None:
            return self._in_halves(buffer, wire_dtype, (False, True), visit)
        wire = self._wire_of(buffer, wire_dtype)
        if self._halves is None or not buffer.numel():
            return Finished()
        index = self._index_for(buffer.numel() * wire.itemsize)
        executor = self._channel.executors[index]
        self._bytes_sent += self._elements_sent(index, buffer.numel()) * wire.itemsize
        buffer = buffer.detach()
        if isinstance(executor, NcclExecutor):
            return self._channel.launch(lambda: executor.launch(buffer, wire), executor)
        return self._channel.begin(
            lambda limit: executor.reduce(buffer, wire, limit), buffer.numel() * wire.itemsize
        )

    def scatter(self, buffer: torch.Tensor, wire_dtype: torch.dtype | None = None) -> Pending:
        """Begin the first half of `start`: this worker's `shard` becomes that of the sum.

        What the rest of the buffer holds is then undefined.
        """
        return self._in_halves(buffer, wire_dtype, (False,))

    def gather(self, buffer: torch.Tensor, wire_dtype: torch.dtype | None = None) -> Pending:
        """Begin the second half of `start`: everyone gets the shards of all."""
        return self._in_halves(buffer, wire_dtype, (True,))

    def shard(self, length: int) -> Span:
        """The part of a buffer of `length` elements that is this worker's between the halves.

        It depends on nothing but the length. Each element is in one worker's shard; with plans
        that have a root it is the root's.
        """
        return self._halves.shard(length) if self._halves is not None else Span(0, length)

    def _wire_of(self, buffer: torch.Tensor, wire_dtype: torch.dtype | None) -> torch.dtype:
        if buffer.dim() != 1 or not buffer.is_contiguous() or not buffer.is_floating_point():
            raise ValueError(
                f"a 1-D contiguous floating-point buffer is needed, not {buffer.dtype} of shape "
                f"{tuple(buffer.shape)}"
            )
        wire = wire_dtype or buffer.dtype
        if not wire.is_floating_point or wire.itemsize > buffer.element_size():
            raise ValueError(f"wire_dtype = {wire}: must be a float no wider than {buffer.dtype}")
        self._channel.check()
        return wire

    def _in_halves(
        self,
        buffer: torch.Tensor,
        wire_dtype: torch.dtype | None,
        halves: tuple[bool, ...],
        visit: Callable[[torch.Tensor], None] | None = None,
    ) -> Pending:
        """Some halves, False for the first; between both comes the visit."""
        wire = self._wire_of(buffer, wire_dtype)
        executor, buffer = self._halves, buffer.detach()
        if executor is None or not buffer.numel():
            if visit is not None:
                visit(buffer)
            return Finished()
        elements = sum(self._half_sent(buffer.numel(), gathering) for gathering in halves)
        self._bytes_sent += elements * wire.itemsize
        if isinstance(executor, NcclExecutor):
            return self._channel.launch(
                lambda: executor.launch(buffer, wire, visit, halves=halves), executor
            )

        def act(limit: Deadline) -> None:
            for gathering in halves:
                if gathering and visit is not None:
                    span = executor.shard(buffer.numel())
                    visit(buffer[span.start : span.stop])
                executor.half(buffer, wire, limit, gathering=gathering)

        return self._channel.begin(act, buffer.numel() * wire.itemsize)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a small tensor of any shape and numeric type over all workers, in place.

        Returns:
            The same tensor.
        """

        def act(executor: Executor, limit: Deadline) -> None:
            whole = tensor.detach().contiguous()
            executor.all_reduce(whole, limit)
            if whole.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(whole)

        self._bytes_sent += 2 * (self.world_size - 1) * tensor.nbytes // self.world_size
        self._channel.now(act)
        return tensor

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Overwrite `tensor` on all workers with that of rank `source`; any shape and type.

        Returns:
            The same tensor.
        """

        def act(executor: Executor, limit: Deadline) -> None:
            whole = tensor.detach().contiguous()
            executor.broadcast(whole, source, limit)
            if whole.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(whole)

        if not 0 <= source < self.world_size:
            raise ValueError(f"source {source} is not in [0, {self.world_size})")
        if self.rank == source and self.world_size > 1:
            self._bytes_sent += tensor.nbytes
        self._channel.now(act)
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Copies of the tensors of all ranks, in rank order; all of one shape and type."""
        found: list[torch.Tensor] = []

        def act(executor: Executor, limit: Deadline) -> None:
            found.extend(executor.all_gather(tensor.detach().contiguous(), limit))

        self._channel.now(act)
        return found if self._halves is not None else [tensor.detach().clone()]

    def all_gather_object(self, value: Any) -> list[Any]:
        """The values of all ranks, in rank order. They are pickled: workers trust each other."""
        if self._halves is None:
            self._channel.check()
            return [value]
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        lengths = [int(each) for each in self.all_gather(torch.tensor([len(data)]))]
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(data)] = data
        return [
            pickle.loads(each[:length].numpy().tobytes())
            for each, length in zip(self.all_gather(padded), lengths, strict=True)
        ]

    def exchange(
        self, tensor: torch.Tensor, to: Sequence[int], sources: Sequence[int]
    ) -> list[torch.Tensor]:
        """Send `tensor` to some ranks and receive those of others, all of one shape and type.

        All workers call it together and agree on who sends to whom; a rank may be named several
        times. Nobody names itself.

        Args:
            tensor: Left as it is.
            to: Ranks to send to.
            sources: Ranks to receive from.

        Returns:
            What came from `sources`, in their order.
        """
        found: list[torch.Tensor] = []
        whole = tensor.detach().contiguous()
        self._bytes_sent += len(to) * whole.nbytes
        self._channel.now(lambda executor, limit: found.extend(
            executor.exchange(whole, to, sources, limit)
        ))  # fmt: skip
        return found

    def barrier(self) -> None:
        """Return when all workers have called it."""
        self._channel.now(lambda executor, limit: executor.barrier(limit))

    def close(self) -> None:
        """Let queued operations end, then give back thread and connections. Safe to call twice."""
        self._channel.close()

    def __enter__(self) -> Reducer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _index_for(self, message_bytes: int) -> int:
        return next(i for i, (limit, _) in enumerate(self._plans) if message_bytes <= limit)
