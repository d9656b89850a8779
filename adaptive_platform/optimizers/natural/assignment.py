"""Which worker inverts which layer, and who preconditions it (KAISA, arXiv 2107.01739)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Grid", "Placement", "gradient_workers", "place"]


def gradient_workers(world_size: int, fraction: float) -> int:
    """Workers that precondition a layer: the largest divisor of `world_size` up to the fraction.

    KAISA asks for a fraction that divides; rounding down lets any number of workers work.

    Args:
        world_size: Workers.
        fraction: In [0, 1]. 0: one worker per layer (MEM-OPT). 1: all of them (COMM-OPT).
    """
    most = max(1, int(world_size * fraction + 1e-9))
    return max(size for size in range(1, most + 1) if world_size % size == 0)


@dataclass(frozen=True, slots=True)
class Grid:
    """Workers in `workers x (world_size / workers)` rows and columns, row by row."""

    world_size: int
    workers: int
    """Gradient workers per layer; divides `world_size`."""

    @property
    def num_columns(self) -> int:
        """Groups of gradient workers."""
        return self.world_size // self.workers

    def column(self, rank: int) -> tuple[int, ...]:
        """Gradient workers of the layers that `rank` preconditions; they share inverses."""
        return tuple(range(rank % self.num_columns, self.world_size, self.num_columns))

    def row(self, rank: int) -> tuple[int, ...]:
        """Workers that `rank` exchanges preconditioned gradients with: one of each column."""
        first = rank - rank % self.num_columns
        return tuple(range(first, first + self.num_columns))


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one layer is worked on."""

    owner: int
    """Rank that keeps the factors and inverts them."""
    workers: tuple[int, ...]
    """Ranks that hold the inverses and precondition; includes the owner."""


def place(costs: Sequence[float], grid: Grid) -> list[Placement]:
    """Greedy: layers by falling cost, each to the least loaded column and its least loaded rank.

    Args:
        costs: Work of each layer, such as the sum of n^3 over its factors.
        grid: The workers.

    Returns:
        A placement per layer, in the order given.
    """
    load = [0.0] * grid.world_size
    placements: dict[int, Placement] = {}
    columns = [grid.column(first) for first in range(grid.num_columns)]
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        column = min(columns, key=lambda ranks: sum(load[rank] for rank in ranks))
        owner = min(column, key=lambda rank: load[rank])
        load[owner] += costs[index]
        placements[index] = Placement(owner, column)
    return [placements[index] for index in range(len(costs))]
