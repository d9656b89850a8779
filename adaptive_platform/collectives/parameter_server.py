"""Everyone sends to one worker and hears back from it: the baseline that all-reduce replaced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from adaptive_platform.collectives.plan import MessagesConfig, Plan, whole_world
from adaptive_platform.collectives.schedules import Algorithm, Op

__all__ = ["ParameterServerConfig"]


class ParameterServerConfig(MessagesConfig):
    """Worker 0 sums for all; its link carries every buffer, so time grows with the workers."""

    kind: Literal["parameter_server"] = "parameter_server"

    def plan(self, world_size: int, node_of_rank: Sequence[str] | None = None) -> Plan:
        """Two phases of `N - 1` rounds, one buffer in each (FireCaffe, 1511.00175, section 3)."""
        phases = (
            *whole_world(Op.REDUCE, world_size, Algorithm.STAR),
            *whole_world(Op.BROADCAST, world_size, Algorithm.STAR),
        )
        return Plan("parameter_server", world_size, (1, world_size), phases)
