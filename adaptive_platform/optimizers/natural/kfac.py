"""K-FAC as used since 2018: running averages of the factors, fixed intervals, optional KL clip."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from adaptive_platform.optimizers.config import Share
from adaptive_platform.optimizers.natural.kronecker import KroneckerConfig
from adaptive_platform.optimizers.natural.refresh import FixedRefresh

__all__ = ["KfacConfig"]


class KfacConfig(KroneckerConfig):
    """Osawa et al. 2018 (arXiv 1811.12019) with the intervals of KAISA (arXiv 2107.01739).

    Factors follow KFC's scaling: A sums over positions, gradients are those of each sample's own
    loss. Damping of kfac-pytorch, whose factors are scaled otherwise, does not carry over. The
    average starts from the first batch, not from the identity. Of the 2015 paper's machinery, the
    exact-Fisher rescaling and the adaptive damping are left out, as later work does.
    """

    kind: Literal["kfac"] = "kfac"
    lr: float = Field(default=0.1, gt=0)
    """Learning rate at the base batch, before schedule and learning-rate rule; > 0."""
    damping: float = Field(default=1e-3, gt=0)
    """lam at the reference batch; > 0."""
    factor_interval: int = Field(default=10, ge=1)
    """Steps of the reference batch between two updates of a factor; >= 1."""
    inverse_interval: int = Field(default=100, ge=1)
    """Steps of the reference batch between two inverses of a layer; >= 1."""
    factor_decay: Share = 0.95
    """Share of a factor's old average that stays, per update at the reference batch; in [0, 1).
    0: only the newest batch."""
    kl_clip: Annotated[float, Field(gt=0)] | None = 1e-3
    """kappa: preconditioned gradients are scaled down where lr^2 <P, gradient> exceeds it; > 0.
    Null: never."""

    def refresh_policy(self) -> FixedRefresh:
        """Fixed intervals in samples."""
        return FixedRefresh(self.factor_interval, self.inverse_interval, self.factor_decay)
