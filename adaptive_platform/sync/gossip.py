"""Gossiping SGD, pull and push, in lockstep (Jin et al. 2016, arXiv 1611.04581)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from pydantic import Field
from torch import Tensor

from adaptive_platform.progress import Progress
from adaptive_platform.sync.strategy import FlatWeights, Peers, SyncConfig, SyncStrategy

__all__ = ["GossipConfig", "draw_peers"]


class GossipConfig(SyncConfig):
    """Each worker mixes its weights with those of random peers after its own step.

    Pull: `x_i = (x_i + sum of the drawn x_j) / (draws + 1)`. Push: what others sent is added,
    `x_i = (S + a x_i) / (c + a)` for c arrivals, a = 2 where it drew itself. Departure from the
    paper: workers exchange in lockstep, so a peer's weights are of the same step and never older.
    The exact mean of all copies is what is scored and saved.
    """

    kind: Literal["gossip"] = "gossip"
    direction: Literal["pull", "push"] = "pull"
    """`pull`: read from the drawn peer, which stays as it is. `push`: send to it."""
    period: int = Field(default=1, ge=1)
    """Steps between two exchanges: tau."""
    draws: int = Field(default=1, ge=1)
    """Peers drawn in an exchange."""

    def build(self, weights: FlatWeights, peers: Peers, *, seed: int) -> SyncStrategy:
        """See `SyncConfig.build`."""
        return _Gossip(self, weights, peers, seed)


def draw_peers(seed: int, exchange: int, world_size: int, draws: int) -> list[list[int]]:
    """Whom each rank draws, uniformly over all ranks, itself included; equal on all workers.

    Args:
        seed: Of the run.
        exchange: Number of the exchange, from 1.
        world_size: Workers.
        draws: Peers per worker.
    """
    generator = np.random.default_rng([seed, exchange, world_size])
    found: list[list[int]] = generator.integers(world_size, size=(world_size, draws)).tolist()
    return found


class _Gossip(SyncStrategy):
    def __init__(self, config: GossipConfig, weights: FlatWeights, peers: Peers, seed: int) -> None:
        super().__init__(weights, peers)
        self._config = config
        self._seed = seed
        self._steps = 0

    def sums_gradients(self, progress: Progress) -> bool:
        del progress
        return False

    def after_step(self, samples: int) -> None:
        del samples
        self._steps += 1
        if self._steps % self._config.period or self._peers.world_size == 1:
            return
        exchange = self._steps // self._config.period
        drawn = draw_peers(self._seed, exchange, self._peers.world_size, self._config.draws)
        if self._config.direction == "pull":
            self._pull(drawn)
        else:
            self._push(drawn)

    def _pull(self, drawn: list[list[int]]) -> None:
        me = self._peers.rank
        own = self._weights.read()
        readers = [rank for rank, peers in enumerate(drawn) for j in peers if j == me != rank]
        sources = [j for j in drawn[me] if j != me]
        arrived = self._peers.exchange(own, readers, sources)
        mixed = own * (1 + len(drawn[me]) - len(sources))
        for other in arrived:
            mixed += other
        self._weights.write(mixed.div_(1 + len(drawn[me])))

    def _push(self, drawn: list[list[int]]) -> None:
        me = self._peers.rank
        own = self._weights.read()
        targets = [j for j in drawn[me] if j != me]
        senders = [rank for rank, peers in enumerate(drawn) for j in peers if j == me != rank]
        arrived = self._peers.exchange(own, targets, senders)
        share = 1 + len(drawn[me]) - len(targets)
        mixed = own * share
        for other in arrived:
            mixed += other
        self._weights.write(mixed.div_(share + len(arrived)))

    @property
    def copies_differ(self) -> bool:
        return self._steps > 0 and self._peers.world_size > 1

    def agreed(self) -> Tensor | None:
        return self._mean(1) if self.copies_differ else None

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._steps = int(state["steps"])
