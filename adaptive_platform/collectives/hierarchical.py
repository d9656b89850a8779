"""Reduce in the group, all-reduce between masters, broadcast (Jia et al. 2018, 1807.11205)."""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt
from typing import Literal

from pydantic import Field

from adaptive_platform.collectives.plan import Axis, MessagesConfig, Phase, Plan
from adaptive_platform.collectives.schedules import Op

__all__ = ["HierarchicalConfig"]


class HierarchicalConfig(MessagesConfig):
    """Only one worker per group talks to other groups, with the whole buffer."""

    kind: Literal["hierarchical"] = "hierarchical"
    group_size: int | None = Field(None, ge=1)
    """Workers per group, the last group may be smaller. Left out: the workers of one machine
    where the machines are known and there are several, otherwise about the square root of N."""

    def plan(self, world_size: int, node_of_rank: Sequence[str] | None = None) -> Plan:
        """`4 (k - 1) + 2 (N/k - 1)` rounds for N workers in groups of k."""
        groups = self._groups(world_size, node_of_rank)
        masters = tuple(group[0] for group in groups)
        shared = tuple(group for group in groups if len(group) > 1)
        phases: list[Phase] = []
        if shared:
            phases.append(Phase(Op.REDUCE, Axis.NODE, shared))
        if len(masters) > 1:
            phases.append(Phase(Op.ALL_REDUCE, Axis.MASTERS, (masters,)))
        if shared:
            phases.append(Phase(Op.BROADCAST, Axis.NODE, shared))
        return Plan("hierarchical", world_size, (1, world_size), tuple(phases))

    def _groups(
        self, world_size: int, node_of_rank: Sequence[str] | None
    ) -> tuple[tuple[int, ...], ...]:
        if self.group_size is None and node_of_rank is not None:
            members: dict[str, list[int]] = {}
            for rank, node in enumerate(node_of_rank):
                members.setdefault(node, []).append(rank)
            if len(members) > 1:
                return tuple(tuple(ranks) for ranks in members.values())
        size = self.group_size or isqrt(world_size)
        return tuple(
            tuple(range(first, min(first + size, world_size)))
            for first in range(0, world_size, size)
        )
