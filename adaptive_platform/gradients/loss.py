"""Losses, one number per sample: the step sums them, so no mean can be taken over the wrong set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from adaptive_platform.settings import Settings

__all__ = ["LossConfig", "SampleLoss", "correct_predictions"]

SampleLoss = Callable[[Tensor, Tensor], Tensor]
"""`(outputs (b, ...), targets (b, ...)) -> losses (b,)`."""


class LossConfig(Settings):
    """Cross entropy of class scores."""

    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the target spread over all classes, in training only (Szegedy et al. 2016)."""

    def build(self) -> SampleLoss:
        """The training loss: outputs (b, classes) and targets (b,) give losses (b,)."""

        def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(
                outputs, targets, reduction="none", label_smoothing=self.label_smoothing
            )

        return cross_entropy

    def build_evaluation(self) -> SampleLoss:
        """The same without smoothing, so that runs with different smoothing can be compared."""
        return LossConfig().build()


def correct_predictions(outputs: Tensor, targets: Tensor) -> Tensor | None:
    """Number of right classes, 0-dim float32; None where outputs are not class scores.

    Args:
        outputs: Scores of shape (b, classes).
        targets: Class numbers of shape (b,).
    """
    if outputs.dim() != 2 or targets.dim() != 1 or targets.is_floating_point():
        return None
    return (outputs.detach().argmax(dim=1) == targets).sum(dtype=torch.float32)
