"""What an optimizer may ask of the other workers, as callables it is handed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

__all__ = ["Exchange"]


def _nothing_to_add(tensor: Tensor) -> object:
    return tensor


def _nothing_to_copy(tensor: Tensor, source: int) -> object:
    return tensor


def _only_mine(tensor: Tensor) -> list[Tensor]:
    return [tensor]


@dataclass(frozen=True, slots=True)
class Exchange:
    """One worker's link to the others; the default is a worker alone.

    All members make the same calls in the same order, and get the same bits.
    """

    rank: int = 0
    """This worker among the members, in [0, world_size)."""
    world_size: int = 1
    """Number of members."""
    all_reduce: Callable[[Tensor], object] = _nothing_to_add
    """Replaces a tensor by its sum over the members."""
    broadcast: Callable[[Tensor, int], object] = _nothing_to_copy
    """Replaces a tensor by that of one member."""
    all_gather: Callable[[Tensor], list[Tensor]] = _only_mine
    """Everyone's tensors, of one shape, in the order of ranks."""
    subgroup: Callable[[Sequence[int]], Exchange] | None = None
    """The link among the given members only, which must include this one; every member calls it
    once, with its own group. None where groups can't be made."""

    def among(self, ranks: Sequence[int]) -> Exchange:
        """The link among `ranks`, in their order.

        Raises:
            ValueError: A proper part of the members, and groups can't be made.
        """
        if len(ranks) == self.world_size:
            return self
        if len(ranks) == 1:
            return Exchange()
        if self.subgroup is None:
            raise ValueError("this exchange can't make groups of some of its members")
        return self.subgroup(ranks)
