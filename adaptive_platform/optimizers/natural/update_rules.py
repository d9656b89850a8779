"""What follows preconditioning: momentum tied to the learning rate, clipping, weight rescaling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

__all__ = ["MomentumRule", "kl_clip", "momentum_at", "rescale_weight"]

MomentumRule = Literal["constant", "ratio", "correction"]


def momentum_at(
    rule: MomentumRule, momentum: float, lr: float, base_lr: float, last_lr: float | None
) -> float:
    """Momentum of a step.

    Args:
        rule: `ratio`: `m0 lr / base_lr`, at most m0 (SP-NGD's paper). `correction`:
            `m0 min(1, lr / last_lr)` (its released code). `constant`: m0.
        momentum: m0.
        lr: Learning rate of the step.
        base_lr: Learning rate that m0 belongs to.
        last_lr: Learning rate of the step before; None at the first.
    """
    if rule == "ratio":
        return momentum * min(1.0, lr / base_lr)
    if rule == "correction" and last_lr:
        return momentum * min(1.0, lr / last_lr)
    return momentum


def kl_clip(
    directions: Sequence[Tensor], gradients: Sequence[Tensor], lr: float, kappa: float
) -> Tensor:
    """Factor on the preconditioned gradients: `min(1, sqrt(kappa / |lr^2 sum <P, dW>|))`, 0-dim.

    As in KAISA's code (arXiv 2107.01739); 1 where the sum is 0. Stays on the device.
    """
    terms = [(p * g).sum() for p, g in zip(directions, gradients, strict=True)]
    size = torch.stack(terms).sum().abs() * lr**2
    return torch.where(size > 0, (kappa / size).sqrt(), torch.ones_like(size)).clamp(max=1.0)


def rescale_weight(weight: Tensor) -> None:
    """Shrink a weight in place to norm `sqrt(2 d_out)` where it is larger (arXiv 2002.06015).

    Batch norm makes the function indifferent to the scale of the weights before it; smaller ones
    keep the effective learning rate up.
    """
    norm = torch.linalg.vector_norm(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
    factor = (math.sqrt(2 * weight.shape[0]) / (norm + 1e-9)).clamp(max=1.0)
    weight.mul_(factor.to(weight.dtype))
