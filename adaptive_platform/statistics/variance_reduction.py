"""The ratios of VRGD over a run: refreshed at an interval, smoothed, and part of the checkpoint.

Each worker keeps those of its own shard of the gradient. Whole, by name, they exist only on their
way into and out of checkpoints and from one set of workers to the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pydantic import Field

from adaptive_platform.settings import Settings

__all__ = ["VarianceReduction", "VarianceReductionConfig"]

ADAM_MOMENTUM = 0.9
"""b3 of VR-Adam and VR-LAMB, as published."""


class VarianceReductionConfig(Settings):
    """Gradients reduced element by element where devices disagree (VRGD, arXiv 2309.13681).

    A device is one micro-batch of one worker. Devices of unequal size count by their samples, so
    that mean and variance belong to the gradient that is reduced; the paper has equal ones, 8 or
    more. A refresh costs half a reduction of the gradient's size: squares go only to the worker
    that owns an element, who reduces the mean gradient before it goes to the others. In memory it
    takes one more copy of the gradient, and one shared out over the workers. Where a worker is lost
    and the others go on, its ratios are lost too: all start anew with a refresh.
    """

    gamma: float = Field(default=0.1, gt=0.0, le=1.0)
    """Least multiplier of an element. 1: plain gradients."""
    every: int = Field(default=1, ge=1)
    """Optimizer steps from one refresh to the next; between them the last ratios are used."""
    momentum: float | None = Field(default=None, ge=0.0, lt=1.0)
    """Share of the old ratios that stays at a refresh (b3). None: 0.9 for optimizers with betas, as
    published for Adam and LAMB, else 0."""

    def build(self, *, for_betas: bool) -> VarianceReduction:
        """Ratios that nothing is known of.

        Args:
            for_betas: The optimizer keeps averages of gradients and of their squares.
        """
        momentum = self.momentum
        if momentum is None:
            momentum = ADAM_MOMENTUM if for_betas else 0.0
        return VarianceReduction(self, momentum)


class VarianceReduction:
    """Multipliers in [gamma, 1] for every element of this worker's shards."""

    def __init__(self, config: VarianceReductionConfig, momentum: float) -> None:
        self._config = config
        self._momentum = momentum
        self._averages: list[torch.Tensor] = []
        self._refreshes = 0
        self._refreshed_at = 0
        self.whole: dict[str, torch.Tensor] | None = None
        """Averages of all elements by name, until they are dealt out; see `deal_out`."""

    @property
    def known(self) -> bool:
        """False before the first refresh: gradients stay as they are."""
        return self._refreshes > 0

    def due(self, step: int) -> bool:
        """True when optimizer step number `step`, counted from 0, is to refresh the ratios."""
        return self._refreshes == 0 or step - self._refreshed_at >= self._config.every

    @property
    def averages(self) -> Sequence[torch.Tensor]:
        """Smoothed ratios of each shard, float32, before bias correction; empty if not known."""
        return self._averages

    def deal_out(self, averages: Sequence[torch.Tensor]) -> None:
        """Go on with these, which are this worker's shards of `whole`."""
        self._averages, self.whole = list(averages), None

    def forget_shards(self) -> None:
        """Shards of other workers come now: only what `whole` holds goes on."""
        self._averages = []
        if self.whole is None:
            self._refreshes = 0

    @torch.no_grad()
    def begin_refresh(self, step: int, shards: Sequence[torch.Tensor]) -> None:
        """Expect ratios from one step for every element, by `take`.

        Args:
            step: Number of the optimizer step, from 0.
            shards: Float32 tensors of the shards' lengths, on their device.
        """
        if not self._averages:
            self._averages = [torch.zeros_like(shard) for shard in shards]
        self.whole = None
        self._refreshes += 1
        self._refreshed_at = step

    @torch.no_grad()
    def take(self, index: int, start: int, ratios: torch.Tensor) -> None:
        """Take the ratios of a portion in.

        Args:
            index: Of the shard.
            start: The portion's first element in the shard.
            ratios: Float32, 1-D, of any size; ended at gamma and 1 here, and copied.
        """
        average = self._averages[index][start : start + ratios.numel()]
        if self._momentum:
            average.lerp_(ratios.clamp(self._config.gamma, 1.0), 1.0 - self._momentum)
        else:
            torch.clamp(ratios, self._config.gamma, 1.0, out=average)

    @torch.no_grad()
    def apply(self, index: int, start: int, gradient: torch.Tensor) -> None:
        """Reduce a portion of any multiple of the mean gradient, in place.

        Args:
            index: Of the shard.
            start: The portion's first element in the shard.
            gradient: 1-D.
        """
        gradient.mul_(self._averages[index][start : start + gradient.numel()])
        if self._momentum > 0.0:
            gradient.mul_(1.0 / (1.0 - self._momentum**self._refreshes))

    def state_dict(self) -> dict[str, Any]:
        """Numbers and tensors for a checkpoint; those of a fresh start where `whole` is None."""
        whole = self.whole or {}
        return {
            "averages": {name: value.cpu() for name, value in whole.items()},
            "refreshes": self._refreshes if whole else 0,
            "refreshed_at": self._refreshed_at,
        }

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Continue from `state_dict`, bit for bit."""
        self._refreshes = int(state["refreshes"])
        self._refreshed_at = int(state["refreshed_at"])
        self._averages = []
        averages = {name: value.to(device) for name, value in state["averages"].items()}
        self.whole = averages or None
