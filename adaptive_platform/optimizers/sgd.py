"""SGD with momentum: torch's own, whose buffer holds gradients and so needs no correction."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from pydantic import Field, field_validator
from pydantic_core.core_schema import ValidationInfo
from torch import nn

from adaptive_platform.optimizers.config import OptimizerConfig, Share

__all__ = ["SgdConfig"]


class SgdConfig(OptimizerConfig):
    """`u <- m u + g; w <- w - lr u` (`torch.optim.SGD`).

    The buffer holds gradients, not steps, so a change of the learning rate acts on the whole
    buffer at once. That is what momentum correction achieves for code that stores `lr u`
    (Goyal et al. 2017, arXiv 1706.02677, section 3, remark 2); none is needed here.
    """

    kind: Literal["sgd"] = "sgd"
    lr: float = Field(default=0.1, gt=0)
    """Learning rate at the base batch, before schedule and learning-rate rule; > 0."""
    momentum: Share = 0.9
    """m, the share of the old buffer that stays; in [0, 1)."""
    nesterov: bool = False
    """Step along `g + m u` instead of `u`. Needs momentum > 0."""
    foreach: bool | None = None
    """Multi-tensor kernels. Null lets torch decide: on for accelerators, off on a CPU, where
    walking one tensor at a time is faster. torch's `fused` is not offered: on a CPU it gives wrong
    results in silence where gradient and parameter differ in memory layout. With `nesterov` it
    stays off: torch's multi-tensor form then writes into the gradients of undecayed parameters."""

    @field_validator("nesterov")
    @classmethod
    def _momentum_to_look_ahead_with(cls, nesterov: bool, info: ValidationInfo) -> bool:
        if nesterov and info.data.get("momentum") == 0:
            raise ValueError("needs momentum > 0; set momentum, or nesterov to false")
        return nesterov

    @field_validator("foreach")
    @classmethod
    def _gradients_stay(cls, foreach: bool | None, info: ValidationInfo) -> bool | None:
        if foreach and info.data.get("nesterov"):
            raise ValueError(
                "with nesterov torch's multi-tensor form changes gradients in place; set it to null"
            )
        return foreach

    def build(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.SGD:
        """`torch.optim.SGD` over the trainable parameters; see the base class."""
        return torch.optim.SGD(
            self.groups(named_parameters),
            lr=self.lr,
            momentum=self.momentum,
            nesterov=self.nesterov,
            foreach=False if self.nesterov else self.foreach,
        )
