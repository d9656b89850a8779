"""What gradient buckets are handed by other rooms, as protocols: sums, shards, norms, exchanges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["Exchange", "Halves", "Pending", "Preconditioner"]


class Pending(Protocol):
    """A reduction under way."""

    def wait(self) -> None:
        """Return when the buffer holds the sum over all workers; raise when it failed."""


class Preconditioner(Protocol):
    """Norms in the optimizer's own eyes: those of `P g`, with one P for all of a step."""

    @property
    def active(self) -> bool:
        """False while P is the identity."""

    def begin(self) -> None:
        """Fix P for the step to come, alike on all workers."""

    def sqnorms(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
        """|P g|^2 of each parameter, float32."""

    def part_sqnorms(
        self,
        parameters: Sequence[Tensor],
        parts: Sequence[tuple[int, int]],
        gradients: Sequence[Tensor],
    ) -> Tensor:
        """|P g|^2 of 1-D parts, `[start, stop)` of each parameter in the order of its memory.

        May be called on another thread while `sqnorms` runs.
        """


class Exchange(Protocol):
    """Sums all gradients of a step at its end, with a state that only committed steps move."""

    def prepare(self, lengths: Sequence[int], device: torch.device) -> None:
        """Expect gradients of these lengths from now on."""

    def sum(self, gradients: Sequence[Tensor], rider: Tensor) -> None:
        """Sum 1-D gradients, which may stay incomplete, and the rider exactly, in place."""

    def commit(self) -> None:
        """The step of the latest `sum` counts."""


class Halves(Protocol):
    """Sums over all workers with a moment in between, at which each element has one owner."""

    def shard(self, length: int) -> tuple[int, int]:
        """Elements `[start, stop)` of a buffer of that length that this worker owns."""

    def start(self, buffer: Tensor, visit: Callable[[Tensor], None]) -> Pending:
        """Sum in place; `visit` changes the shard before it goes to the others.

        It is called behind the caller's back, maybe on another thread.
        """

    def narrow(self, part: Tensor) -> None:
        """Round a part to what the second half lets others know of it, in place."""

    def scatter(self, buffer: Tensor, *, exact: bool = False) -> Pending:
        """The first half alone: only the shard is then the sum's. `exact`: nothing is narrowed."""

    def gather(self, buffer: Tensor, *, exact: bool = False) -> Pending:
        """The second half alone: all shards come to everyone."""
