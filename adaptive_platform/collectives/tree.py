"""Reduction along a binomial tree and broadcast back (FireCaffe, Iandola et al., 1511.00175)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from adaptive_platform.collectives.plan import MessagesConfig, Plan, whole_world
from adaptive_platform.collectives.schedules import Algorithm, Op

__all__ = ["TreeConfig"]


class TreeConfig(MessagesConfig):
    """Binomial tree: few rounds, but the whole buffer on every level."""

    kind: Literal["tree"] = "tree"

    def plan(self, world_size: int, node_of_rank: Sequence[str] | None = None) -> Plan:
        """Two phases of `ceil(log2 N)` rounds; each worker but one sends its buffer up once."""
        phases = (
            *whole_world(Op.REDUCE, world_size, Algorithm.TREE),
            *whole_world(Op.BROADCAST, world_size, Algorithm.TREE),
        )
        return Plan("tree", world_size, (1, world_size), phases)
