"""Local SGD, post-local SGD and hierarchical local SGD (Lin et al. 2018, arXiv 1808.07217)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field
from torch import Tensor

from adaptive_platform.progress import Duration, Progress
from adaptive_platform.sync.strategy import FlatWeights, Peers, SyncConfig, SyncStrategy

__all__ = ["LocalSgdConfig"]


class LocalSgdConfig(SyncConfig):
    """Each worker takes several steps of its own between two averages of the weights.

    Momentum and other optimizer state stay private: never averaged, never reset. Departures from
    the authors' code: before `start` gradients are summed, as in ordinary training, so workers
    enter the local phase with equal momentum; copies are weighted by the samples they were trained
    on since the last average, so that uneven shares count right.
    """

    kind: Literal["local_sgd"] = "local_sgd"
    period: int = Field(default=8, ge=1)
    """Local steps between two averages: H."""
    start: Duration = Duration(0.0)
    """Training before the first local step: post-local SGD begins at the first drop of the
    learning rate. 0: local from the beginning."""
    block_rounds: int = Field(default=1, ge=1)
    """Averages of which only the last is over all workers and the others over those of one node:
    H_b of hierarchical local SGD. 1: always all workers."""

    def build(self, weights: FlatWeights, peers: Peers, *, seed: int) -> SyncStrategy:
        """See `SyncConfig.build`."""
        del seed
        return _LocalSgd(self, weights, peers)


class _LocalSgd(SyncStrategy):
    def __init__(self, config: LocalSgdConfig, weights: FlatWeights, peers: Peers) -> None:
        super().__init__(weights, peers)
        self._config = config
        self._local_steps = 0
        self._since_global = 0
        self._since_node = 0

    def sums_gradients(self, progress: Progress) -> bool:
        start = self._config.start
        return progress.elapsed(start.unit) < start.value

    def after_step(self, samples: int) -> None:
        self._local_steps += 1
        self._since_global += samples
        self._since_node += samples
        if self._local_steps % self._config.period:
            return
        if self._local_steps % (self._config.period * self._config.block_rounds):
            self._average_on_node()
        else:
            self._weights.write(self._mean(self._since_global))
            self._since_global = 0
        self._since_node = 0

    def _average_on_node(self) -> None:
        flat = self._weights.read(extra=1)
        flat[-1] = 1.0
        self._peers.sum_on_node(flat.mul_(self._since_node))
        if float(flat[-1]) > 0.0:
            self._weights.write(flat[:-1].div_(flat[-1]))

    @property
    def copies_differ(self) -> bool:
        # Also right after an average: momentum stays private.
        return self._local_steps > 0 and self._peers.world_size > 1

    def agreed(self) -> Tensor | None:
        if not self.copies_differ:
            return None
        if self._local_steps % (self._config.period * self._config.block_rounds) == 0:
            return self._weights.read()  # averaged over everyone just now
        return self._mean(self._since_global)

    def state_dict(self) -> dict[str, Any]:
        return {"local_steps": self._local_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._local_steps = int(state["local_steps"])

    def own_state(self) -> dict[str, float | int]:
        return {"since_global": self._since_global, "since_node": self._since_node}

    def load_own_state(self, state: Mapping[str, float | int]) -> None:
        self._since_global = int(state["since_global"])
        self._since_node = int(state["since_node"])
