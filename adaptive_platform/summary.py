"""What the gradient statistics say: the value that controllers and learning-rate rules read."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["GradientSummary"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientSummary:
    """Smoothed statistics of single-example gradients, so no batch size is built into them.

    Every derived reading is a ratio of the two averages, never an average of ratios
    (McCandlish et al. 2018, arXiv 1812.06162, appendix A).
    """

    noise_trace: float | None = None
    """S: trace of the per-example gradient covariance. None before the first observation."""
    signal_sqnorm: float | None = None
    """G2: squared norm of the true gradient. May be <= 0 while noise hides the signal."""
    observations: int = 0
    """Steps that contributed."""
    biased: bool = False
    """True where a single gradient per step forced a biased estimator."""
    gsnr: float | None = None
    """Mean over layers of `G2_l / S_l`, a single example's signal-to-noise ratio. A batch of B has
    B times as much. None while no layers are measured."""
    hessian_top_eigenvalue: float | None = None
    """Top eigenvalue of the loss's Hessian on the probe batch. None while not measured."""

    @property
    def usable(self) -> bool:
        """True when both averages exist and are positive, so that ratios mean something."""
        return (
            self.noise_trace is not None
            and self.signal_sqnorm is not None
            and self.noise_trace > 0.0
            and self.signal_sqnorm > 0.0
        )

    @property
    def noise_scale(self) -> float | None:
        """S / G2 in examples, the batch at which noise equals signal; None while not usable."""
        if not self.usable:
            return None
        assert self.noise_trace is not None
        assert self.signal_sqnorm is not None
        ratio = self.noise_trace / self.signal_sqnorm
        return ratio if math.isfinite(ratio) else None

    def gain(self, batch: float, base_batch: float) -> float:
        """AdaScale gain of one step at `batch`, in base-batch steps (arXiv 2007.05105, eq. 5).

        `(S/B0 + G2) / (S/B + G2)` with S and G2 clipped at zero; lies between 1 and B/B0 for
        B >= B0. 1 while nothing was measured.
        """
        if self.noise_trace is None or self.signal_sqnorm is None:
            return 1.0
        noise, signal = max(self.noise_trace, 0.0), max(self.signal_sqnorm, 0.0)
        below = noise / batch + signal
        return (noise / base_batch + signal) / below if below > 0.0 else 1.0

    def efficiency(self, batch: float, base_batch: float) -> float:
        """Statistical efficiency of a sample at `batch` (Pollux, OSDI 2021): gain * B0 / B."""
        return self.gain(batch, base_batch) * base_batch / batch
