"""LAMB: Adam's direction, scaled per layer to a fraction of the weight norm."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, field_validator
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

__all__ = ["LAMB", "LambConfig"]


class LAMB(MultiTensorOptimizer):
    """Layer-wise adaptive moments (You et al. 2019, arXiv 1904.00962).

    Per tensor, at its t-th step:
    `m <- b1 m + (1-b1) g; v <- b2 v + (1-b2) g^2; r = m^/(sqrt(v^) + eps) + wd w;
    w <- w - lr (phi(|w|) / |r|) r`, the ratio 1 where |w| or |r| is zero. `m^` and `v^` are bias
    corrected, or plain with `bias_correction` false (some versions: like a longer warm-up).
    Groups with `layerwise` false take the ratio as 1.
    """

    buffer_keys: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    number_keys: ClassVar[tuple[str, ...]] = ("step",)

    def __init__(
        self,
        params: ParamsT,
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        weight_norm_bounds: tuple[float, float] | None = None,
        layerwise: bool = True,
    ) -> None:
        """Take parameters or groups; every option can be set per group.

        Args:
            params: As for `torch.optim`; one tensor is one layer.
            lr: Global learning rate.
            betas: b1 and b2, each in [0, 1).
            eps: Outside the square root.
            weight_decay: wd, decoupled and inside the layer's direction r.
            bias_correction: Divide the averages by `1 - b^t`.
            weight_norm_bounds: phi clamps |w| to these; None for phi(z) = z.
            layerwise: False for a ratio of 1.
        """
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "weight_norm_bounds": weight_norm_bounds,
            "layerwise": layerwise,
        }
        super().__init__(params, defaults)

    def update(self, group: dict[str, Any], batch: TensorBatch) -> None:
        """One step on one batch."""
        params, grads = batch.params, batch.grads
        means, squares = batch.state["exp_avg"], batch.state["exp_avg_sq"]
        beta1, beta2 = group["betas"]
        steps = self._count(params)
        torch._foreach_lerp_(means, grads, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, value=1 - beta2)
        below = list(torch._foreach_sqrt(squares))
        if group["bias_correction"]:  # m^ / (sqrt(v^) + eps), with one pass less
            roots = [(1 - beta2**t) ** 0.5 for t in steps]
            torch._foreach_add_(below, [group["eps"] * root for root in roots])
            direction = list(torch._foreach_div(means, below))
            torch._foreach_mul_(
                direction, [root / (1 - beta1**t) for root, t in zip(roots, steps, strict=True)]
            )
        else:
            torch._foreach_add_(below, group["eps"])
            direction = list(torch._foreach_div(means, below))
        if group["weight_decay"]:
            torch._foreach_add_(direction, params, alpha=group["weight_decay"])
        lr = float(group["lr"])
        if group["layerwise"]:
            add_scaled(params, direction, _ratios(group, params, direction) * -lr)
        else:
            torch._foreach_add_(params, direction, alpha=-lr)

    def _count(self, params: list[Tensor]) -> list[int]:
        for param in params:
            self.state[param]["step"] = self.state[param].get("step", 0) + 1
        return [self.state[param]["step"] for param in params]


def _ratios(group: dict[str, Any], params: list[Tensor], direction: list[Tensor]) -> Tensor:
    weights, steps = norms(params), norms(direction)
    bounds = group["weight_norm_bounds"]
    above = weights if bounds is None else weights.clamp(*bounds)
    return trust_ratios(above, steps, (weights > 0) & (steps > 0))


class LambConfig(OptimizerConfig):
    """Layer-wise adaptive moments (arXiv 1904.00962); see `LAMB`."""

    kind: Literal["lamb"] = "lamb"
    lr: float = Field(default=5e-3, gt=0)
    """Learning rate at the base batch; > 0. Published for ResNet-50: 0.005 at 512, times the
    square root of two per doubling."""
    weight_decay: float = Field(default=1e-2, ge=0)
    """Decoupled decay, part of the layer's direction; >= 0."""
    betas: tuple[Share, Share] = (0.9, 0.999)
    """Share of the old average that stays, of gradient and squared gradient; each in [0, 1)."""
    eps: float = Field(default=1e-6, gt=0)
    """Added to the root of the squared-gradient average; > 0."""
    bias_correction: bool = True
    """Undo the averages' start from zero. False acts like a longer warm-up."""
    weight_norm_bounds: tuple[float, float] | None = None
    """Clamp |w| to [low, high] in the trust ratio; null for no clamp."""

    @field_validator("weight_norm_bounds")
    @classmethod
    def _ordered(cls, bounds: tuple[float, float] | None) -> tuple[float, float] | None:
        if bounds is not None and not 0 <= bounds[0] < bounds[1]:
            raise ValueError("write [low, high] with 0 <= low < high, or null")
        return bounds

    def build(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> LAMB:
        """`LAMB` over the trainable parameters; see the base class."""
        return LAMB(
            self.groups(named_parameters, layerwise=False),
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            bias_correction=self.bias_correction,
            weight_norm_bounds=self.weight_norm_bounds,
        )
