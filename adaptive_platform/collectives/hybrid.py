"""One plan for small messages and another for large ones (Jia et al. 2018, 1807.11205)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from pydantic import Field

from adaptive_platform.collectives.halving_doubling import HalvingDoublingConfig
from adaptive_platform.collectives.hierarchical import HierarchicalConfig
from adaptive_platform.collectives.plan import MessagesConfig, Plan, PlanTable, ReducerConfig
from adaptive_platform.collectives.ring import RingConfig
from adaptive_platform.collectives.torus import TorusConfig
from adaptive_platform.collectives.tree import TreeConfig

__all__ = ["HybridConfig"]

_KINDS: dict[str, Callable[[], ReducerConfig]] = {
    "halving_doubling": HalvingDoublingConfig,
    "hierarchical": HierarchicalConfig,
    "ring": RingConfig,
    "torus": TorusConfig,
    "tree": TreeConfig,
}


class HybridConfig(MessagesConfig):
    """Small messages save rounds, large ones save bytes."""

    kind: Literal["hybrid"] = "hybrid"
    small: Literal["hierarchical", "halving_doubling", "tree"] = "hierarchical"
    """Plan for messages up to `threshold_kib`, with that plan's default settings."""
    large: Literal["ring", "torus"] = "ring"
    """Plan for messages above, with that plan's default settings."""
    threshold_kib: float = Field(256.0, gt=0)
    """Largest small message in KiB."""

    def plans(self, world_size: int, node_of_rank: Sequence[str] | None = None) -> PlanTable:
        """Two plans; every worker sees the same sizes and so takes the same one."""
        small = _KINDS[self.small]().plan(world_size, node_of_rank)
        return (
            (self.threshold_kib * 1024, small),
            (float("inf"), self.plan(world_size, node_of_rank)),
        )

    def plan(self, world_size: int, node_of_rank: Sequence[str] | None = None) -> Plan:
        """The plan of large messages."""
        return _KINDS[self.large]().plan(world_size, node_of_rank)
