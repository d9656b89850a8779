"""What momentum does when the learning rate or the batch moves."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from adaptive_platform.settings import Variant

__all__ = [
    "CorrectMomentumConfig",
    "HoldNoiseConfig",
    "KeepMomentumConfig",
    "MomentumContext",
    "MomentumRuleConfig",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class MomentumContext:
    """What a momentum rule may depend on at one step."""

    batch: int
    """Samples of the step, over all workers."""
    base_batch: int
    """The batch for which learning rate and momentum were chosen."""
    lr_factor: float
    """What the learning-rate rule and the controller multiply the schedule by."""
    lr: float
    """Learning rate of this step."""
    previous_lr: float
    """Learning rate of the step before; 0 at the first step."""
    lr_in_buffer: bool
    """True where the buffer holds `lr * gradient` (LARS in the paper's form); False where the
    learning rate is applied to the buffer (`torch.optim.SGD`)."""


class MomentumRuleConfig(Variant):
    """How momentum follows learning rate and batch."""

    @abstractmethod
    def momentum(self, chosen: float, context: MomentumContext) -> float:
        """The factor on the buffer at this step.

        Args:
            chosen: The momentum that the user chose for the base batch, in [0, 1).
            context: The step.
        """


class KeepMomentumConfig(MomentumRuleConfig):
    """The chosen momentum at every step, as AdaScale publishes it."""

    kind: Literal["keep"] = "keep"

    def momentum(self, chosen: float, context: MomentumContext) -> float:
        """See `MomentumRuleConfig.momentum`."""
        return chosen


class CorrectMomentumConfig(MomentumRuleConfig):
    """Rescale a buffer that holds learning rates (Goyal et al. 2017, arXiv 1706.02677, 2.1).

    A buffer without learning rates needs no correction and gets the chosen momentum.
    """

    kind: Literal["correct"] = "correct"

    def momentum(self, chosen: float, context: MomentumContext) -> float:
        """See `MomentumRuleConfig.momentum`; above 1 for one step where the rate jumps up."""
        if not context.lr_in_buffer or context.previous_lr == 0.0:
            return chosen
        return chosen * context.lr / context.previous_lr


class HoldNoiseConfig(MomentumRuleConfig):
    """Keep the noise `lr * D / (B (1 - m))` of the base batch (Smith et al. 2017, 1711.00489).

    What the learning rate does not make up for when the batch grows, momentum does, by rising.
    """

    kind: Literal["hold_noise"] = "hold_noise"
    max_momentum: float = Field(default=0.99, ge=0.0, lt=1.0)
    """Largest momentum: the buffer needs about `B / (D (1 - m))` epochs to fill."""

    def momentum(self, chosen: float, context: MomentumContext) -> float:
        """See `MomentumRuleConfig.momentum`; never lowers a larger chosen one by its cap."""
        decay = (1.0 - chosen) * context.lr_factor * context.base_batch / context.batch
        return min(max(1.0 - decay, 0.0), max(self.max_momentum, chosen))
