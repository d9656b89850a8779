"""Recursive halving and doubling between partners (Goyal et al. 2017, 1706.02677, section 4)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from adaptive_platform.collectives.plan import Axis, MessagesConfig, Phase, Plan
from adaptive_platform.collectives.schedules import Algorithm, Op

__all__ = ["HalvingDoublingConfig"]


class HalvingDoublingConfig(MessagesConfig):
    """As few bytes as a ring in `2 log2 N` rounds, where N is a power of two."""

    kind: Literal["halving_doubling"] = "halving_doubling"

    def plan(self, world_size: int, node_of_rank: Sequence[str] | None = None) -> Plan:
        """Workers beyond the largest power of two fold into a partner first and hear back last."""
        core = 1 << (world_size.bit_length() - 1)
        partners = tuple((rank - core, rank) for rank in range(core, world_size))
        phases: list[Phase] = []
        if partners:
            phases.append(Phase(Op.REDUCE, Axis.PAIR, partners, Algorithm.TREE))
        if core > 1:
            everyone = (tuple(range(core)),)
            axis = Axis.CORE if partners else Axis.WORLD
            phases.append(Phase(Op.ALL_REDUCE, axis, everyone, Algorithm.HALVING))
        if partners:
            phases.append(Phase(Op.BROADCAST, Axis.PAIR, partners, Algorithm.TREE))
        return Plan("halving_doubling", world_size, (1, world_size), tuple(phases))
