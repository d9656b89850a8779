"""Who keeps, inverts and applies which layer, and the links between those who do."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from adaptive_platform.errors import UserError
from adaptive_platform.optimizers.exchange import Exchange
from adaptive_platform.optimizers.natural.assignment import (
    Grid,
    Placement,
    gradient_workers,
    place,
)
from adaptive_platform.optimizers.natural.blocks import KroneckerBlock, Statistic

__all__ = ["Workers"]

_INVERSE_SHARE = 0.05
"""Share of the steps in which a layer's inverses are made anew, for weighing layers."""


class Workers:
    """Layers are dealt out once their sizes were seen in a step, or in a checkpoint.

    Args:
        exchange: All workers.
        fraction: Share of the workers that precondition a layer.

    Raises:
        UserError: The fraction needs groups that `exchange` can't make.
    """

    def __init__(self, exchange: Exchange, fraction: float) -> None:
        self.all = exchange
        self._grid = Grid(exchange.world_size, gradient_workers(exchange.world_size, fraction))
        self._placements: dict[str, Placement] = {}
        self.column_ranks = self._grid.column(exchange.rank)
        """Ranks that hold the same inverses as this one."""
        self.row_ranks = self._grid.row(exchange.rank)
        """Ranks that make what this one does not: one of each column."""
        try:
            self.column = exchange.among(self.column_ranks)
            self.row = exchange.among(self.row_ranks)
        except ValueError as error:
            raise UserError(
                f"optimizer.gradient_worker_fraction = {fraction:g}: between one and all of "
                f"{exchange.world_size} workers would need groups of them, which can't be made "
                "here. Set it to 0 or 1."
            ) from error

    @property
    def world_size(self) -> int:
        """All workers."""
        return self.all.world_size

    @property
    def rank(self) -> int:
        """This worker."""
        return self.all.rank

    @property
    def placed(self) -> bool:
        """Layers were dealt out."""
        return bool(self._placements)

    def place(self, blocks: Sequence[KroneckerBlock]) -> None:
        """Deal the layers out by the work that they are known to make; alike on all workers."""
        costs = [block.apply_cost + _INVERSE_SHARE * block.inverse_cost for block in blocks]
        placements = place(costs, self._grid)
        self._placements = dict(zip([block.name for block in blocks], placements, strict=True))

    def placement(self, block: KroneckerBlock) -> Placement:
        """Where a layer is worked on."""
        return self._placements[block.name]

    def owns(self, block: KroneckerBlock) -> bool:
        """This worker keeps the layer's factors and inverts them."""
        return self._placements[block.name].owner == self.rank

    def applies(self, block: KroneckerBlock) -> bool:
        """This worker holds the layer's inverses and preconditions its gradient."""
        return self.rank in self._placements[block.name].workers

    def keeps(self, part: Statistic) -> bool:
        """This worker keeps the statistic; those of norm layers are small and kept everywhere."""
        placement = self._placements.get(part.name.rpartition(".")[0]) if part.side else None
        return placement is None or placement.owner == self.rank

    def from_owner(self, block: KroneckerBlock, tensor: Tensor | None, length: int) -> Tensor:
        """The owner's tensor on all workers.

        Args:
            block: The layer.
            tensor: What the owner sends, flat; None elsewhere.
            length: Its elements.
        """
        if tensor is None:
            tensor = block.layer.weight.new_empty(length, dtype=block.dtype)
        if self.world_size > 1:
            self.all.broadcast(tensor, self._placements[block.name].owner)
        return tensor
