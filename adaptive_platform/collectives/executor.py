"""What an executor of plans offers the reducer, whatever the backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from adaptive_platform.collectives.deadline import Deadline
from adaptive_platform.collectives.plan import Span

__all__ = ["Executor"]


class Executor(ABC):
    """Carries out operations on the groups of one plan. Calls block until done or `deadline`.

    Every method raises `LinkError` when a peer is lost or the deadline passes.
    """

    @abstractmethod
    def reduce(self, buffer: torch.Tensor, wire_dtype: torch.dtype, deadline: Deadline) -> None:
        """Sum a 1-D contiguous buffer over all workers, in place, as the plan says.

        Between workers its numbers travel as `wire_dtype`, which may be the buffer's own.
        """

    @abstractmethod
    def half(
        self,
        buffer: torch.Tensor,
        wire_dtype: torch.dtype,
        deadline: Deadline,
        *,
        gathering: bool,
    ) -> None:
        """One half of `reduce`, for a plan in halves: up to the shards, or from there on."""

    @abstractmethod
    def shard(self, length: int) -> Span:
        """What this worker owns between the halves of a buffer of that length."""

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor, deadline: Deadline) -> None:
        """Sum a contiguous tensor of any shape with one call of the backend, in place."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, source: int, deadline: Deadline) -> None:
        """Overwrite a contiguous tensor with that of rank `source`."""

    @abstractmethod
    def all_gather(self, tensor: torch.Tensor, deadline: Deadline) -> list[torch.Tensor]:
        """The contiguous tensors of all ranks, which have one shape and type."""

    def exchange(
        self,
        tensor: torch.Tensor,
        to: Sequence[int],
        sources: Sequence[int],
        deadline: Deadline,
    ) -> list[torch.Tensor]:
        """Send a contiguous tensor to some ranks, and return those of others, all of one shape.

        This one gathers from all, which costs more than the messages that were asked for but needs
        nothing of the backend; an executor with messages of its own does better.
        """
        del to
        gathered = self.all_gather(tensor, deadline)
        return [gathered[rank] for rank in sources]

    @abstractmethod
    def barrier(self, deadline: Deadline) -> None:
        """Return when all workers have called it."""
