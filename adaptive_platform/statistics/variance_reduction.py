"""The ratios of VRGD over a run: refreshed at an interval, smoothed, and part of the checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from pydantic import Field

from adaptive_platform.settings import Settings
from adaptive_platform.statistics.gsnr import gsnr_of_means, reduction_ratio

__all__ = ["VarianceReduction", "VarianceReductionConfig"]

ADAM_MOMENTUM = 0.9
"""b3 of VR-Adam and VR-LAMB, as published."""


class VarianceReductionConfig(Settings):
    """Gradients reduced element by element where devices disagree (VRGD, arXiv 2309.13681).

    A device is one micro-batch of one worker. Devices of unequal size count by their samples, so
    that mean and variance belong to the gradient that is reduced; the paper has equal ones, 8 or
    more. Costs one more reduction of the gradient's size at each refresh, and two more copies of
    the gradient in memory.
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
    """Multipliers in [gamma, 1] for every element of every gradient; equal on all workers."""

    def __init__(self, config: VarianceReductionConfig, momentum: float) -> None:
        self._config = config
        self._momentum = momentum
        self._averages: dict[str, torch.Tensor] = {}
        self._refreshes = 0
        self._refreshed_at = 0

    def due(self, step: int) -> bool:
        """True when optimizer step number `step`, counted from 0, is to refresh the ratios."""
        return self._refreshes == 0 or step - self._refreshed_at >= self._config.every

    @torch.no_grad()
    def refresh(
        self, step: int, layers: Iterable[tuple[str, torch.Tensor, torch.Tensor]], count: int
    ) -> None:
        """Take the ratios of one step in.

        Args:
            step: Number of the optimizer step, from 0.
            layers: Name, mean gradient `gbar`, and mean of the devices' squared gradients.
            count: Devices, >= 2.

        Raises:
            ValueError: Fewer than two devices.
        """
        if count < 2:
            raise ValueError(f"count = {count}: a variance needs at least 2 devices")
        for name, mean, mean_square in layers:
            ratio = reduction_ratio(gsnr_of_means(mean.float(), mean_square), self._config.gamma)
            if name not in self._averages:
                self._averages[name] = torch.zeros_like(ratio)
            self._averages[name].lerp_(ratio, 1.0 - self._momentum)
        self._refreshes += 1
        self._refreshed_at = step

    @torch.no_grad()
    def apply(self, gradients: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Multiply mean gradients in place; they stay as they are before the first refresh."""
        if self._refreshes == 0:
            return
        chosen, ratios = [], []
        for name, gradient in gradients:
            chosen.append(gradient)
            ratios.append(self._averages[name].to(gradient.dtype))
        torch._foreach_mul_(chosen, ratios)
        if self._momentum > 0.0:
            torch._foreach_mul_(chosen, 1.0 / (1.0 - self._momentum**self._refreshes))

    def state_dict(self) -> dict[str, Any]:
        """Numbers and tensors for a checkpoint."""
        return {
            "averages": {name: value.cpu() for name, value in self._averages.items()},
            "refreshes": self._refreshes,
            "refreshed_at": self._refreshed_at,
        }

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Continue from `state_dict`, bit for bit."""
        self._averages = {name: value.to(device) for name, value in state["averages"].items()}
        self._refreshes = int(state["refreshes"])
        self._refreshed_at = int(state["refreshed_at"])
