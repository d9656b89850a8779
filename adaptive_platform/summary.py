"""What was measured, as values that controllers and learning-rate rules read: noise and speed."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["GradientSummary", "ThroughputModel"]


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
    preconditioned: bool = False
    """True where S and G2 are those of `P g`, with P the preconditioner of Adam (Pollux)."""
    gsnr: float | None = None
    """Median over layers of `G2_l / S_l`, a single example's signal-to-noise ratio. A batch of B
    has B times as much. None while no layers are measured."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputModel:
    """Seconds of a step as a function of how it is split (Pollux, OSDI 2021, section 3.2).

    `T_grad = alpha_g + beta_g m`; `T_sync` is 0 for one worker, else linear in the workers beyond
    two; the last micro-batch's gradient overlaps with the reduction as far as `gamma` says.
    """

    alpha_grad: float
    """Seconds of a micro-batch that do not depend on its size."""
    beta_grad: float
    """Seconds per sample of a micro-batch."""
    alpha_local: float
    """Seconds of a reduction between two workers on one node."""
    beta_local: float
    """Seconds for each worker beyond two, on one node."""
    alpha_node: float
    """Seconds of a reduction between two workers on different nodes."""
    beta_node: float
    """Seconds for each worker beyond two, over several nodes."""
    gamma: float
    """Overlap of gradient and reduction, from 1 (none) to 10 (nearly full)."""
    fit_error: float = 0.0
    """Mean relative error of the fitted step times."""

    def step_seconds(
        self, world_size: int, num_nodes: int, microbatch: float, accumulation: int
    ) -> float:
        """Predicted seconds of one optimizer step.

        Args:
            world_size: Workers.
            num_nodes: Nodes that they are spread over.
            microbatch: Samples of one forward and backward pass on one worker.
            accumulation: Micro-batches per worker and step, >= 1.
        """
        gradient = self.alpha_grad + self.beta_grad * microbatch
        reduction = 0.0
        if world_size > 1:
            alpha, beta = self.alpha_local, self.beta_local
            if num_nodes > 1:
                alpha, beta = self.alpha_node, self.beta_node
            reduction = alpha + beta * (world_size - 2)
        longer, shorter = max(gradient, reduction), min(gradient, reduction)
        if longer <= 0.0:
            return 0.0
        overlapped = longer * (1.0 + (shorter / longer) ** self.gamma) ** (1.0 / self.gamma)
        return (accumulation - 1) * gradient + overlapped
