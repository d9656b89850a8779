"""LARS: each layer's step is a fixed fraction of its weight norm, which lets the rate grow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from adaptive_platform.optimizers.config import OptimizerConfig, Share
from adaptive_platform.optimizers.multi_tensor import (
    MultiTensorOptimizer,
    TensorBatch,
    add_scaled,
    norms,
    trust_ratios,
)

__all__ = ["LARS", "LarsConfig", "LarsForm"]

LarsForm = Literal["paper", "corrected", "unscaled", "clip"]


class LARS(MultiTensorOptimizer):
    """Layer-wise adaptive rate scaling (You, Gitman, Ginsburg 2017, arXiv 1708.03888).

    With gradient g (no decay inside), weights w, decay b, coefficient c and learning rate lr, the
    trust ratio of a tensor is `r = c|w| / (|g| + b|w| + eps)`, and 1 where a norm is zero; it is
    computed in at least float32 and stays on the device. The forms differ in what the momentum
    buffer holds; their learning rates are not interchangeable:

    - `paper`: `v <- m v + lr r (g + b w); w <- w - v`. Rate and ratio inside.
    - `corrected`: `v <- m v + r (g + b w); w <- w - lr v`. Ratio inside, rate outside: the paper's
      form with Goyal's momentum correction, which differs as soon as the rate moves.
    - `unscaled`: `h = g + b w; r = c|w| / (|h| + b|w| + eps); v <- m v + h; w <- w - lr r v`. Both
      outside, as in the TPU runs (Ying et al. 2018, arXiv 1811.06992), whose gradient held the
      decay from the loss, so that it counts twice in the denominator.
    - `clip`: as `corrected`, with `min(r / lr, 1)` for r: a layer's rate is `min(r, lr)` (LARC).

    Where the ratio is 1 because a norm is zero, decay still acts, in every form (LARC's public
    wrapper leaves it out there). Groups with `layerwise` false get plain momentum SGD.
    """

    buffer_keys: ClassVar[tuple[str, ...]] = ("momentum_buffer",)

    def __init__(
        self,
        params: ParamsT,
        *,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        eps: float = 0.0,
        form: LarsForm = "paper",
        layerwise: bool = True,
    ) -> None:
        """Take parameters or groups; every option can be set per group.

        Args:
            params: As for `torch.optim`; one tensor is one layer.
            lr: Global learning rate.
            momentum: m, in [0, 1).
            weight_decay: b, added after the norms are taken (but see `unscaled`).
            trust_coefficient: c.
            eps: Added below the line of the ratio.
            form: Where ratio and rate enter, see above.
            layerwise: False for plain momentum SGD.
        """
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "eps": eps,
            "form": form,
            "layerwise": layerwise,
        }
        super().__init__(params, defaults)

    def update(self, group: dict[str, Any], batch: TensorBatch) -> None:
        """One step of the group's form on one batch."""
        params, buffers = batch.params, batch.state["momentum_buffer"]
        lr, decay = float(group["lr"]), group["weight_decay"]
        torch._foreach_mul_(buffers, group["momentum"])
        if group["form"] == "unscaled":
            grads = batch.grads
            if decay:
                grads = list(torch._foreach_add(grads, params, alpha=decay))
            torch._foreach_add_(buffers, grads)
            if group["layerwise"]:
                add_scaled(params, buffers, _ratios(group, params, grads) * -lr)
            else:
                torch._foreach_add_(params, buffers, alpha=-lr)
            return
        inside, outside = (lr, 1.0) if group["form"] == "paper" else (1.0, lr)
        if group["layerwise"]:
            ratios = _ratios(group, params, batch.grads)
            if group["form"] == "clip":
                ratios = torch.clamp(ratios / lr, max=1.0) if lr else torch.ones_like(ratios)
            add_scaled(buffers, batch.grads, ratios * inside)
            if decay:
                add_scaled(buffers, params, ratios * (inside * decay))
        else:
            torch._foreach_add_(buffers, batch.grads, alpha=inside)
            if decay:
                torch._foreach_add_(buffers, params, alpha=inside * decay)
        torch._foreach_add_(params, buffers, alpha=-outside)


def _ratios(group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> Tensor:
    weights, gradients = norms(params), norms(grads)
    below = gradients + group["weight_decay"] * weights + group["eps"]
    either_zero = (weights == 0) | (gradients == 0)
    return trust_ratios(group["trust_coefficient"] * weights, below, ~either_zero)


class LarsConfig(OptimizerConfig):
    """Layer-wise adaptive rate scaling (arXiv 1708.03888); see `LARS` for the forms."""

    kind: Literal["lars"] = "lars"
    lr: float = Field(default=1.0, gt=0)
    """Learning rate at the base batch; > 0. Layers see only its product with the coefficient;
    published peaks are 25 to 41 at batches from 16,384 on."""
    momentum: Share = 0.9
    """m, the share of the old buffer that stays; in [0, 1)."""
    trust_coefficient: float = Field(default=0.001, gt=0)
    """c, a layer's step as a share of its weight norm per unit of learning rate; > 0."""
    eps: float = Field(default=0.0, ge=0)
    """Added below the line of the trust ratio; published: 0, 1e-9, 1e-8 and 1e-6."""
    form: LarsForm = "paper"
    """`paper`: learning rate and ratio in the momentum buffer. `corrected`: only the ratio.
    `unscaled`: neither (TPU). `clip`: a layer's rate is the smaller of ratio and learning rate
    (LARC). Learning rates do not carry over between forms."""

    @property
    def lr_in_buffer(self) -> bool:
        """True in the paper's form."""
        return self.form == "paper"

    def build(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> LARS:
        """`LARS` over the trainable parameters; see the base class."""
        return LARS(
            self.groups(named_parameters, layerwise=False),
            lr=self.lr,
            momentum=self.momentum,
            trust_coefficient=self.trust_coefficient,
            eps=self.eps,
            form=self.form,
        )
