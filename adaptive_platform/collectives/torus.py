"""All-reduce over a 2-D grid of workers (Mikami et al. 2018, arXiv 1811.05233, section 2.2).

```
            row (fast links): X workers
          +----+----+----+----+      1. reduce-scatter along the rows
   Y rows | 0  | 1  | 2  | 3  |      2. all-reduce along the columns, each on 1/X of the buffer
          | 4  | 5  | 6  | 7  |      3. all-gather along the rows
          +----+----+----+----+
```

Every worker sends as much as in a flat ring, `2 (N - 1) / N` of the buffer, in
`2 (X - 1) + 2 (Y - 1)` rounds rather than `2 (N - 1)`; only `1/X` of it crosses between rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt
from typing import Literal

from pydantic import field_validator

from adaptive_platform.collectives.plan import Axis, MessagesConfig, Phase, Plan
from adaptive_platform.collectives.schedules import Algorithm, Op
from adaptive_platform.errors import UserError

__all__ = ["TorusConfig", "rows_by_node", "square_grid"]


class TorusConfig(MessagesConfig):
    """Reduce-scatter along rows, all-reduce along columns, all-gather along rows."""

    kind: Literal["torus"] = "torus"
    grid: tuple[int, int] | None = None
    """Rows Y and row length X, for a fixed number of workers Y * X. Left out: one row per
    machine where all machines hold equally many workers, otherwise the squarest grid; a prime
    number of workers makes one column, which is a plain all-reduce."""

    both_directions: bool = False
    """In rows and columns alike, let the halves of each chunk go opposite ways round, so that all
    links of a grid work both ways. For machines that are wired as one; behind a switch each card
    sends and receives as much either way. With Gloo columns are then our own messages too, and
    `slices` has no effect; NCCL chooses its own rings."""

    @field_validator("grid")
    @classmethod
    def _positive(cls, grid: tuple[int, int] | None) -> tuple[int, int] | None:
        if grid is not None and min(grid) < 1:
            raise ValueError("rows and row length must be at least 1")
        return grid

    def plan(self, world_size: int, node_of_rank: Sequence[str] | None = None) -> Plan:
        """Three phases; fewer where the grid has one row or one column.

        Raises:
            UserError: `grid` does not hold `world_size` workers.
        """
        rows = self._rows(world_size, node_of_rank)
        columns = tuple(zip(*rows, strict=True))
        num_rows, row_length = len(rows), len(rows[0])
        algorithm = Algorithm.BOTH_WAYS if self.both_directions else Algorithm.RING
        phases: list[Phase] = []
        if row_length > 1:
            phases.append(Phase(Op.REDUCE_SCATTER, Axis.ROW, rows, algorithm))
        if num_rows > 1:
            phases.append(Phase(Op.ALL_REDUCE, Axis.COLUMN, columns, algorithm))
        if row_length > 1:
            phases.append(Phase(Op.ALL_GATHER, Axis.ROW, rows, algorithm))
        return Plan("torus", world_size, (num_rows, row_length), tuple(phases))

    def _rows(
        self, world_size: int, node_of_rank: Sequence[str] | None
    ) -> tuple[tuple[int, ...], ...]:
        if self.grid is not None:
            num_rows, row_length = self.grid
            if num_rows * row_length != world_size:
                raise UserError(
                    f"reducer.grid = [{num_rows}, {row_length}]: holds {num_rows * row_length} "
                    f"workers, but there are {world_size}. Leave grid out to have it chosen for "
                    "any number of workers."
                )
        else:
            by_node = rows_by_node(node_of_rank) if node_of_rank is not None else None
            if by_node is not None:
                return by_node
            num_rows, row_length = square_grid(world_size)
        return tuple(
            tuple(range(row * row_length, (row + 1) * row_length)) for row in range(num_rows)
        )


def square_grid(world_size: int) -> tuple[int, int]:
    """Rows and row length of the squarest grid; rows are at least as long as columns.

    A prime has no useful grid and gets one column, which is a plain all-reduce.
    """
    num_rows = next(y for y in range(isqrt(world_size), 0, -1) if world_size % y == 0)
    return (num_rows, world_size // num_rows) if num_rows > 1 else (world_size, 1)


def rows_by_node(node_of_rank: Sequence[str]) -> tuple[tuple[int, ...], ...] | None:
    """One row per machine; None unless there are several, all with the same number (> 1)."""
    members: dict[str, list[int]] = {}
    for rank, node in enumerate(node_of_rank):
        members.setdefault(node, []).append(rank)
    sizes = {len(ranks) for ranks in members.values()}
    if len(members) < 2 or len(sizes) != 1 or sizes == {1}:
        return None
    return tuple(tuple(ranks) for ranks in members.values())
