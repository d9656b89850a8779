"""RMSprop warm-up: starts close to RMSprop and slides into momentum SGD over the first epochs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import nn
from torch.optim.optimizer import ParamsT

from adaptive_platform.optimizers.config import OptimizerConfig, Share
from adaptive_platform.optimizers.multi_tensor import MultiTensorOptimizer, TensorBatch

__all__ = ["RMSpropWarmup", "RmspropWarmupConfig", "sgd_share"]


def sgd_share(epochs: float, *, center: float, period: float, slope_factor: float = 1.0) -> float:
    """alpha_SGD of Akiba et al. 2017 (arXiv 1711.04325, section 3): 0 is RMSprop, 1 is SGD.

    Exponential up to `1/2` at `center`, then linear to 1, reached half a period later.

    Args:
        epochs: Fractional epochs done.
        center: Epoch at which both halves weigh the same; beta_center.
        period: Twice the epochs from there to pure SGD; beta_period.
        slope_factor: Of the linear part. 1 joins without a kink and reaches 1 in time; some
            re-implementations write 2, which reaches it after a quarter period.
    """
    if epochs < center:
        return 0.5 * math.exp(2.0 * (epochs - center) / period)
    if epochs < center + period / 2:
        return min(1.0, 0.5 + slope_factor * (epochs - center) / period)
    return 1.0


class RMSpropWarmup(MultiTensorOptimizer):
    """Momentum SGD whose gradient is at first divided by its root mean square.

    `s <- mu2 s + (1-mu2) h^2; d <- mu1 d - (a + (1-a) (rms_lr/lr) / (sqrt(s) + eps)) h;
    w <- w + lr d` with `h = g + weight_decay w` and `a = sgd_share(epochs)`. s is not bias
    corrected, and rests once a is 1. While the rate is zero the RMSprop part is left out: its
    ratio to the rate has no meaning then.

    The loop calls `set_progress` before every step; nothing of it needs saving.
    """

    buffer_keys: ClassVar[tuple[str, ...]] = ("momentum_buffer", "square_avg")

    def __init__(
        self,
        params: ParamsT,
        *,
        lr: float,
        momentum: float = 0.9,
        square_decay: float = 0.99,
        rms_lr: float = 3e-4,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        center_epochs: float = 10.0,
        period_epochs: float = 5.0,
        slope_factor: float = 1.0,
    ) -> None:
        """Take parameters or groups.

        Args:
            params: As for `torch.optim`.
            lr: Learning rate of the SGD part.
            momentum: mu1, in [0, 1).
            square_decay: mu2, in [0, 1).
            rms_lr: Learning rate of the RMSprop part.
            eps: Added to the root mean square.
            weight_decay: Added to the gradient.
            center_epochs: See `sgd_share`.
            period_epochs: See `sgd_share`.
            slope_factor: See `sgd_share`.
        """
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "square_decay": square_decay,
            "rms_lr": rms_lr,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)
        self._center, self._period, self._slope = center_epochs, period_epochs, slope_factor
        self.sgd_share = 0.0
        self.set_progress(0.0)

    def set_progress(self, epochs: float) -> None:
        """Set the share of SGD for the next step from the fractional epochs done."""
        self.sgd_share = sgd_share(
            epochs, center=self._center, period=self._period, slope_factor=self._slope
        )

    def update(self, group: dict[str, Any], batch: TensorBatch) -> None:
        """One step on one batch."""
        params, grads = batch.params, batch.grads
        deltas, squares = batch.state["momentum_buffer"], batch.state["square_avg"]
        if group["weight_decay"]:
            grads = list(torch._foreach_add(grads, params, alpha=group["weight_decay"]))
        torch._foreach_mul_(deltas, group["momentum"])
        torch._foreach_add_(deltas, grads, alpha=-self.sgd_share)
        lr = float(group["lr"])
        if self.sgd_share < 1.0:
            torch._foreach_mul_(squares, group["square_decay"])
            torch._foreach_addcmul_(squares, grads, grads, value=1 - group["square_decay"])
            if lr > 0.0:
                rms_lr = group["rms_lr"] * group.get("lr_scale", 1.0)
                roots = list(torch._foreach_sqrt(squares))
                torch._foreach_add_(roots, group["eps"])
                share = -(1.0 - self.sgd_share) * rms_lr / lr
                torch._foreach_addcdiv_(deltas, grads, roots, value=share)
        torch._foreach_add_(params, deltas, alpha=lr)


class RmspropWarmupConfig(OptimizerConfig):
    """RMSprop that turns into momentum SGD (arXiv 1711.04325); see `RMSpropWarmup`."""

    kind: Literal["rmsprop_warmup"] = "rmsprop_warmup"
    lr: float = Field(default=0.1, gt=0)
    """Learning rate of the SGD part at the base batch; > 0."""
    momentum: Share = 0.9
    """mu1, the share of the old step that stays; in [0, 1)."""
    square_decay: Share = 0.99
    """mu2, the share of the old squared-gradient average that stays; in [0, 1)."""
    rms_lr: float = Field(default=3e-4, gt=0)
    """Learning rate of the RMSprop part, which neither schedule nor batch moves; > 0."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root mean square; > 0."""
    center_epochs: float = Field(default=10.0, ge=0)
    """Epoch at which RMSprop and SGD weigh the same."""
    period_epochs: float = Field(default=5.0, gt=0)
    """Pure SGD begins half of this after the centre, in epochs; > 0."""
    steep: bool = False
    """Twice the slope after the centre, as two re-implementations have it."""

    def build(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> RMSpropWarmup:
        """`RMSpropWarmup` over the trainable parameters; see the base class."""
        return RMSpropWarmup(
            self.groups(named_parameters),
            lr=self.lr,
            momentum=self.momentum,
            square_decay=self.square_decay,
            rms_lr=self.rms_lr,
            eps=self.eps,
            center_epochs=self.center_epochs,
            period_epochs=self.period_epochs,
            slope_factor=2.0 if self.steep else 1.0,
        )
