"""Elastic averaging SGD, synchronous form (Zhang, Choromanska, LeCun 2015, arXiv 1412.6651)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field
from torch import Tensor

from adaptive_platform.progress import Progress
from adaptive_platform.sync.strategy import FlatWeights, Peers, SyncConfig, SyncStrategy

__all__ = ["EasgdConfig"]


class EasgdConfig(SyncConfig):
    """Each worker trains alone and is drawn to a common centre, which is drawn to all of them.

    Every `period` steps `d_i = (beta / p) (x_i - centre)`, `x_i -= d_i` and `centre += sum of d_i`
    over the p workers, then the gradient step, with the gradient taken before the exchange. The
    centre is what is scored and saved; each worker holds a copy of it. With a Nesterov optimizer
    this is EAMSGD.
    """

    kind: Literal["easgd"] = "easgd"
    period: int = Field(default=1, ge=1)
    """Steps between two exchanges: tau."""
    beta: float = Field(default=0.9, gt=0, le=1)
    """Share of the way that the centre moves to the mean of the workers; a worker moves `beta / p`
    of its way to the centre."""

    def build(self, weights: FlatWeights, peers: Peers, *, seed: int) -> SyncStrategy:
        """See `SyncConfig.build`."""
        del seed
        return _Easgd(self, weights, peers)


class _Easgd(SyncStrategy):
    def __init__(self, config: EasgdConfig, weights: FlatWeights, peers: Peers) -> None:
        super().__init__(weights, peers)
        self._period = config.period
        self._alpha = config.beta / peers.world_size
        self._centre = weights.read()
        self._steps = 0

    def sums_gradients(self, progress: Progress) -> bool:
        del progress
        return False

    def before_step(self) -> None:
        self._steps += 1
        if self._steps % self._period:
            return
        own = self._weights.read()
        pull = (own - self._centre).mul_(self._alpha)
        self._weights.write(own.sub_(pull))
        self._peers.sum(pull)
        self._centre.add_(pull)

    @property
    def copies_differ(self) -> bool:
        return self._steps > 0

    def agreed(self) -> Tensor | None:
        return self._centre if self._steps else None

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps, "centre": self._centre}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._steps = int(state["steps"])
        self._centre.copy_(state["centre"])
