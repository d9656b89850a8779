"""SP-NGD: Kronecker-factored natural gradient with statistics refreshed on an adaptive schedule."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from adaptive_platform.optimizers.config import Share
from adaptive_platform.optimizers.natural.kronecker import KroneckerConfig
from adaptive_platform.optimizers.natural.refresh import AdaptiveRefresh
from adaptive_platform.optimizers.natural.update_rules import MomentumRule

__all__ = ["SpNgdConfig"]


class SpNgdConfig(KroneckerConfig):
    """Osawa et al. 2020 (arXiv 2002.06015): only the newest batch's statistics, kept while stale.

    The published settings for ResNet-50: learning rate 8.2e-3, momentum 0.997 at batch 4,096 up to
    0.07 and 0.93 at 131,072; damping 2.5e-4 down to 1e-4; polynomial decay. They are the paper's
    algorithm with `kl_clip: null`, which is on by default here.
    """

    kind: Literal["sp_ngd"] = "sp_ngd"
    lr: float = Field(default=0.03, gt=0)
    """Learning rate at the base batch, before schedule and learning-rate rule; > 0."""
    momentum: Share = 0.97
    """m0, the share of the old step that stays at the full learning rate; in [0, 1)."""
    momentum_rule: MomentumRule = "ratio"
    """`ratio`: momentum over learning rate stays m0 / lr (the paper), at most m0. `correction`: m0
    times the fall of the learning rate since the step before (the released code). `constant`."""
    rescale_weights: bool = True
    """After each step shrink convolution and linear weights to norm sqrt(2 d_out)."""
    kl_clip: Annotated[float, Field(gt=0)] | None = 1e-3
    """kappa: preconditioned gradients are scaled down where lr^2 <P, gradient> exceeds it; > 0.
    Null: never, as published. The published rates and damping belong to batches from 4,096 on; at
    smaller ones, whose factors are noisy, training can diverge without it."""
    refresh_tolerance: float = Field(default=0.1, gt=0, lt=1)
    """alpha: a statistic that changed by less, relative to its Frobenius norm, counts as similar
    and its interval may grow; in (0, 1)."""

    def refresh_policy(self) -> AdaptiveRefresh:
        """Fibonacci growth of intervals."""
        return AdaptiveRefresh()

    @property
    def similarity(self) -> float:
        """Alpha."""
        return self.refresh_tolerance
