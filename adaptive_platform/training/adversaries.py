"""Adversarial examples in the place of a share of a micro-batch (ABSA, arXiv 1810.01021)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from adaptive_platform.data import MicroBatch
from adaptive_platform.errors import UserError
from adaptive_platform.gradients.loss import SampleLoss
from adaptive_platform.gradients.precision import PrecisionConfig
from adaptive_platform.models import in_eval_mode
from adaptive_platform.statistics.adversarial import fgsm, num_adversarial

__all__ = ["with_adversaries"]


def with_adversaries(
    model: nn.Module,
    batch: MicroBatch,
    loss: SampleLoss,
    share: float,
    precision: PrecisionConfig,
) -> MicroBatch:
    """The first samples of a micro-batch moved by the sign of their gradient, the rest as it is.

    Args:
        model: In training mode; in eval mode meanwhile, so that its statistics don't see them.
        batch: On the model's device.
        loss: Losses per sample.
        share: Part of the micro-batch to replace.
        precision: Autocast as in training.

    Raises:
        UserError: Inputs are not real numbers, so they can't be moved a little.
    """
    count = num_adversarial(share, len(batch))
    if count == 0:
        return batch
    if not batch.inputs.is_floating_point():
        raise UserError(
            f"batch.kind: it needs adversarial examples, but the inputs are {batch.inputs.dtype}, "
            "which can't be moved a little. Choose batch.kind=abs, which goes without them."
        )
    first, targets = batch.inputs[:count], batch.targets[:count]

    def total(inputs: Tensor) -> Tensor:
        with precision.autocast(inputs.device.type):
            return loss(model(inputs), targets).sum()

    with in_eval_mode(model):
        moved = fgsm(total, first)
    return replace(batch, inputs=torch.cat([moved, batch.inputs[count:]]))
