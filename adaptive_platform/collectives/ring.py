"""One ring of all workers, as the backend does it by itself: the plain choice, the baseline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from adaptive_platform.collectives.plan import Plan, ReducerConfig, whole_world
from adaptive_platform.collectives.schedules import Algorithm, Op

__all__ = ["RingConfig"]


class RingConfig(ReducerConfig):
    """One all-reduce over everyone, as the backend does it (a ring with Gloo and mostly NCCL)."""

    kind: Literal["ring"] = "ring"
    both_directions: bool = False
    """Let the halves of each chunk go opposite ways round, so that links between neighbours work
    both ways. For machines that are wired as a ring; behind a switch each card sends and receives
    as much either way. With Gloo these are our own messages; NCCL chooses its own rings."""

    def plan(self, world_size: int, node_of_rank: Sequence[str] | None = None) -> Plan:
        """One phase; `2 (N - 1)` rounds and `2 (N - 1) / N` of the buffer per worker."""
        algorithm = Algorithm.BOTH_WAYS if self.both_directions else Algorithm.RING
        phases = whole_world(Op.ALL_REDUCE, world_size, algorithm)
        return Plan("ring", world_size, (1, world_size), phases)
