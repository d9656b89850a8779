"""SGD with momentum, whose buffer holds gradients and so needs no correction; Nesterov's form."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, field_validator
from pydantic_core.core_schema import ValidationInfo
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from adaptive_platform.optimizers.config import OptimizerConfig, Share
from adaptive_platform.optimizers.multi_tensor import MultiTensorOptimizer, TensorBatch

__all__ = ["NesterovSGD", "SgdConfig"]


class NesterovSGD(MultiTensorOptimizer):
    """`h = g + wd w; u <- m u + h; w <- w - lr (h + m u)`, as `torch.optim.SGD` has it.

    Ours because torch's multi-tensor form adds the buffer to the gradients themselves where there
    is no decay, so that whoever measures them afterwards measures something else.
    """

    buffer_keys: ClassVar[tuple[str, ...]] = ("momentum_buffer",)

    def __init__(
        self, params: ParamsT, *, lr: float, momentum: float, weight_decay: float = 0.0
    ) -> None:
        """Take parameters or groups; every option can be set per group.

        Args:
            params: As for `torch.optim`.
            lr: Learning rate.
            momentum: m, in (0, 1).
            weight_decay: wd, added to the gradient.
        """
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    def update(self, group: dict[str, Any], batch: TensorBatch) -> None:
        """One step on one batch."""
        params, grads, buffers = batch.params, batch.grads, batch.state["momentum_buffer"]
        lr = float(group["lr"])
        if group["weight_decay"]:
            grads = list(torch._foreach_add(grads, params, alpha=group["weight_decay"]))
        torch._foreach_mul_(buffers, group["momentum"])
        torch._foreach_add_(buffers, grads)
        torch._foreach_add_(params, grads, alpha=-lr)
        torch._foreach_add_(params, buffers, alpha=-lr * group["momentum"])


class SgdConfig(OptimizerConfig):
    """`u <- m u + g; w <- w - lr u` (`torch.optim.SGD`), or Nesterov's form.

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
    """torch's multi-tensor kernels. Null lets torch decide: on for accelerators, off on a CPU,
    where one tensor at a time is faster. Not with `nesterov`, which always decides by itself.
    torch's `fused` is not offered: on a CPU it gives wrong results in silence where gradient and
    parameter differ in memory layout."""

    @field_validator("nesterov")
    @classmethod
    def _momentum_to_look_ahead_with(cls, nesterov: bool, info: ValidationInfo) -> bool:
        if nesterov and info.data.get("momentum") == 0:
            raise ValueError("needs momentum > 0; set momentum, or nesterov to false")
        return nesterov

    @field_validator("foreach")
    @classmethod
    def _decides_by_itself(cls, foreach: bool | None, info: ValidationInfo) -> bool | None:
        if foreach is not None and info.data.get("nesterov"):
            raise ValueError("with nesterov there is no choice; set it to null")
        return foreach

    def build(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
        """The optimizer over the trainable parameters; see the base class."""
        groups = self.groups(named_parameters)
        if self.nesterov:
            return NesterovSGD(groups, lr=self.lr, momentum=self.momentum)
        return torch.optim.SGD(groups, lr=self.lr, momentum=self.momentum, foreach=self.foreach)
