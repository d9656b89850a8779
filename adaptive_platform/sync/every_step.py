"""Ordinary synchronous training: gradients are summed over all workers in every step."""

from __future__ import annotations

from typing import ClassVar, Literal

from adaptive_platform.progress import Progress
from adaptive_platform.sync.strategy import FlatWeights, Peers, SyncConfig, SyncStrategy

__all__ = ["EveryStepConfig"]


class EveryStepConfig(SyncConfig):
    """Gradients are summed over all workers in each optimizer step."""

    lets_copies_differ: ClassVar[bool] = False
    kind: Literal["every_step"] = "every_step"

    def build(self, weights: FlatWeights, peers: Peers, *, seed: int) -> SyncStrategy:
        """See `SyncConfig.build`."""
        del seed
        return _EveryStep(weights, peers)


class _EveryStep(SyncStrategy):
    def sums_gradients(self, progress: Progress) -> bool:
        del progress
        return True
