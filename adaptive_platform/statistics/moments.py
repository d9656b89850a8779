"""What one step measured: squared gradient norms and the counts they belong to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["DifferencedMoments", "StepMoments"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMoments:
    """Squared norms of one step's mean gradients, over all micro-batches of all workers.

    Gradients are those of mean losses, unscaled, before weight decay and clipping. A worker that
    back-propagated `sum of losses / B` multiplies the squared norm of a micro-batch of b samples
    by `(B / b)^2`. The three means and sums are all a reduction has to carry.
    """

    micro_sqnorm: float
    """mean_i |g_i|^2, with g_i the mean gradient of micro-batch i."""
    inverse_microbatch: float
    """mean_i 1/b_i, in 1/samples, with b_i the true size of micro-batch i."""
    num_microbatches: int
    """Micro-batches of all workers that went into the two means."""
    global_sqnorm: float
    """|G|^2, with G the mean gradient of the whole batch."""
    global_batch: int
    """Samples that entered G."""
    preconditioned: bool = False
    """True where all norms are those of `P g`, with P the preconditioner of Adam (Pollux)."""
    layer_micro_sqnorms: Sequence[float] = ()
    """mean_i |g_i|^2 of each layer, where layers are measured; they add up to `micro_sqnorm`."""
    layer_global_sqnorms: Sequence[float] = ()
    """|G|^2 of each layer, in the same order."""

    @property
    def leverage(self) -> float:
        """`mean_i 1/b_i - 1/B`, in 1/samples: what the spread of the gradients is divided by.

        Zero where one micro-batch is the whole batch: then nothing can be told apart.
        """
        return self.inverse_microbatch - 1.0 / self.global_batch

    @property
    def noise_trace(self) -> float:
        """Unbiased S of this step (McCandlish et al. 2018, arXiv 1812.06162, appendix A)."""
        return (self.micro_sqnorm - self.global_sqnorm) / self.leverage

    @property
    def signal_sqnorm(self) -> float:
        """Unbiased G2 of this step, `|G|^2 - S/B`; negative where noise hides the signal."""
        return self.global_sqnorm - self.noise_trace / self.global_batch

    @property
    def usable(self) -> bool:
        """True when noise can be told from signal and every number is finite."""
        return (
            self.num_microbatches >= 2
            and self.global_batch > 0
            and 0.0 < self.leverage < math.inf
            and math.isfinite(self.noise_trace)
            and math.isfinite(self.signal_sqnorm)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DifferencedMoments:
    """Two consecutive gradients of the whole batch, for one worker with one micro-batch.

    The estimate of AdaptDL (Pollux, OSDI 2021). It takes the movement of the weights between the
    two steps for noise, hence it is biased.
    """

    difference_sqnorm: float
    """|G_t - G_{t-1}|^2."""
    inner_product: float
    """G_t . G_{t-1}."""
    global_batch: int
    """Samples that entered G_t."""
    previous_batch: int
    """Samples that entered G_{t-1}."""
    preconditioned: bool = False
    """True where both gradients were multiplied by Adam's preconditioner of step t."""

    @property
    def noise_trace(self) -> float:
        """S: independent means differ by S (1/B_t + 1/B_{t-1}) on average."""
        return self.difference_sqnorm / (1.0 / self.global_batch + 1.0 / self.previous_batch)

    @property
    def signal_sqnorm(self) -> float:
        """G2: the noise of two independent gradients has no common part."""
        return self.inner_product

    @property
    def usable(self) -> bool:
        """True when both batches exist and every number is finite."""
        return (
            self.global_batch > 0
            and self.previous_batch > 0
            and math.isfinite(self.noise_trace)
            and math.isfinite(self.signal_sqnorm)
        )
