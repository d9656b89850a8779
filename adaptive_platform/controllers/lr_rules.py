"""What the learning rate does when the batch is not the base batch."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Literal, TypeAlias

from pydantic import Field

from adaptive_platform.progress import Progress
from adaptive_platform.settings import Variant
from adaptive_platform.summary import GradientSummary

__all__ = [
    "AdaScaleConfig",
    "Clock",
    "LegwConfig",
    "LinearConfig",
    "LrRuleConfig",
    "NoneConfig",
    "ScalingRuleConfig",
    "SqrtConfig",
]

Clock: TypeAlias = Literal["samples", "scale_invariant"]


class LrRuleConfig(Variant):
    """How the learning rate follows the batch."""

    base_batch: int | None = Field(default=None, ge=1)
    """The batch for which the learning rate was chosen, in samples; gain and scale-invariant
    steps refer to it too. None: the controller's start batch."""
    clock: Clock = "samples"
    """Progress in which the learning-rate schedule is read: `samples`, or `scale_invariant`,
    where a step counts as many base-batch steps as its gain says."""

    @abstractmethod
    def factor(
        self, batch: int, base_batch: int, summary: GradientSummary, progress: Progress
    ) -> float:
        """Factor on the learning rate: finite, >= 0, and exactly 1 at the base batch.

        Args:
            batch: Samples of the step, over all workers.
            base_batch: The batch for which the learning rate was chosen.
            summary: What is known of the gradients' noise, this step's included.
            progress: Where the run stands before the step.
        """

    def advance(self, gain: float) -> float:
        """Scale-invariant length of a step of that gain, in steps of the base batch."""
        return gain

    def chosen(self, *, for_betas: bool) -> LrRuleConfig:
        """The rule with what it leaves open chosen for the optimizer.

        Args:
            for_betas: The optimizer keeps averages of gradients and of their squares.
        """
        return self


class NoneConfig(LrRuleConfig):
    """The learning rate does not follow the batch."""

    kind: Literal["none"] = "none"

    def factor(
        self, batch: int, base_batch: int, summary: GradientSummary, progress: Progress
    ) -> float:
        """See `LrRuleConfig.factor`."""
        return 1.0


class ScalingRuleConfig(LrRuleConfig):
    """A rule that scales, and may be capped."""

    max_factor: float | None = Field(default=None, ge=1.0)
    """Largest factor on the learning rate, and on what a step counts for. None: no cap."""

    def advance(self, gain: float) -> float:
        """The gain, at most `max_factor`: a step counts for what multiplied the learning rate.

        AdaScale, arXiv 2007.05105, algorithm 1: `tau <- tau + r_t` with the r_t of the update.
        """
        return min(gain, self.max_factor or math.inf)

    def factor(
        self, batch: int, base_batch: int, summary: GradientSummary, progress: Progress
    ) -> float:
        """See `LrRuleConfig.factor`."""
        return min(self._scaled(batch, base_batch, summary, progress), self.max_factor or math.inf)

    @abstractmethod
    def _scaled(
        self, batch: int, base_batch: int, summary: GradientSummary, progress: Progress
    ) -> float:
        """The factor before the cap."""


class LinearConfig(ScalingRuleConfig):
    """`B / B0` (Goyal et al. 2017, arXiv 1706.02677)."""

    kind: Literal["linear"] = "linear"

    def _scaled(
        self, batch: int, base_batch: int, summary: GradientSummary, progress: Progress
    ) -> float:
        return batch / base_batch


class SqrtConfig(ScalingRuleConfig):
    """`sqrt(B / B0)`, the usual rule for Adam-like optimizers."""

    kind: Literal["sqrt"] = "sqrt"

    def _scaled(
        self, batch: int, base_batch: int, summary: GradientSummary, progress: Progress
    ) -> float:
        return math.sqrt(batch / base_batch)


class AdaScaleConfig(ScalingRuleConfig):
    """The gain, measured at every step (Johnson et al. 2020, arXiv 2007.05105, algorithm 1).

    One deviation: S and G2 are clipped at zero after they are averaged and not before, so that
    the averages stay unbiased. Without any estimate the factor is 1.
    """

    kind: Literal["adascale"] = "adascale"
    clock: Clock = "scale_invariant"
    """Progress in which the learning-rate schedule is read. Published: `scale_invariant`, one
    schedule of base-batch steps for every batch."""
    exponent: float | None = Field(default=None, gt=0.0, le=1.0)
    """Power of the gain. None: as published, so 1 for SGD and LARS, and 0.5 for optimizers with
    betas (adamw, lamb), whose noise is measured on preconditioned gradients (Pollux, OSDI 2021).
    A step counts for its gain either way."""

    def chosen(self, *, for_betas: bool) -> LrRuleConfig:
        """See `LrRuleConfig.chosen`."""
        if self.exponent is not None:
            return self
        return self.model_copy(update={"exponent": 0.5 if for_betas else 1.0})

    def advance(self, gain: float) -> float:
        """The gain, at most the one at which the learning rate meets `max_factor`."""
        cap = self.max_factor or math.inf
        return min(gain, cap ** (1.0 / self._exponent))

    @property
    def _exponent(self) -> float:
        return 1.0 if self.exponent is None else self.exponent

    def _scaled(
        self, batch: int, base_batch: int, summary: GradientSummary, progress: Progress
    ) -> float:
        return summary.gain(batch, base_batch) ** self._exponent


class LegwConfig(ScalingRuleConfig):
    """`sqrt(B / B0)`, with a warm-up that is B/B0 times as many epochs (LEGW, arXiv 1901.08256).

    The schedule itself warms up linearly over `warmup_epochs`; the factor turns that into the
    longer warm-up, so it starts at `sqrt(k)/k` and reaches `sqrt(k)` after `k * warmup_epochs`,
    k = B/B0.
    """

    kind: Literal["legw"] = "legw"
    warmup_epochs: float = Field(gt=0.0)
    """Epochs of linear warm-up in the schedule, right for the base batch."""

    def _scaled(
        self, batch: int, base_batch: int, summary: GradientSummary, progress: Progress
    ) -> float:
        ratio = batch / base_batch
        warmups = progress.epochs / self.warmup_epochs
        if warmups <= min(ratio, 1.0):
            return math.sqrt(ratio) / ratio
        return math.sqrt(ratio) * min(1.0, warmups / ratio) / min(1.0, warmups)
