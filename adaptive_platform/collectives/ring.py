"""The backend's own all-reduce over all workers: the plain choice, and the baseline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from adaptive_platform.collectives.plan import Plan, ReducerConfig, whole_world
from adaptive_platform.collectives.schedules import Op

__all__ = ["RingConfig"]


class RingConfig(ReducerConfig):
    """One all-reduce over everyone, as the backend does it (a ring with Gloo and mostly NCCL)."""

    kind: Literal["ring"] = "ring"

    def plan(self, world_size: int, node_of_rank: Sequence[str] | None = None) -> Plan:
        """One phase; `2 (N - 1)` rounds and `2 (N - 1) / N` of the buffer per worker."""
        return Plan("ring", world_size, (1, world_size), whole_world(Op.ALL_REDUCE, world_size))
