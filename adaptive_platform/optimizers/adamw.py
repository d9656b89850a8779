"""AdamW: torch's own, Adam with decoupled weight decay."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from pydantic import Field
from torch import nn

from adaptive_platform.optimizers.config import OptimizerConfig, Share

__all__ = ["AdamWConfig"]


class AdamWConfig(OptimizerConfig):
    """Adam with decay on the weights, not in the gradient (arXiv 1711.05101), as torch has it."""

    kind: Literal["adamw"] = "adamw"
    lr: float = Field(default=1e-3, gt=0)
    """Learning rate at the base batch, before schedule and learning-rate rule; > 0."""
    weight_decay: float = Field(default=1e-2, ge=0)
    """Each step takes `lr * weight_decay` of a parameter away; >= 0."""
    betas: tuple[Share, Share] = (0.9, 0.999)
    """Share of the old average that stays, of gradient and squared gradient; each in [0, 1)."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the squared-gradient average; > 0."""
    amsgrad: bool = False
    """Divide by the largest squared-gradient average so far."""
    foreach: bool | None = None
    """Multi-tensor kernels. Null lets torch decide: on for accelerators, off on a CPU."""

    def build(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.AdamW:
        """`torch.optim.AdamW` over the trainable parameters; see the base class."""
        return torch.optim.AdamW(
            self.groups(named_parameters),
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            amsgrad=self.amsgrad,
            foreach=self.foreach,
        )
