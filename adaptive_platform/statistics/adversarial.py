"""Adversarial examples by the sign of the input gradient (FGSM), for ABSA's early training."""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["fgsm", "num_adversarial"]


def num_adversarial(fraction: float, microbatch: int) -> int:
    """How many samples of a micro-batch are replaced (Yao et al. 2018, released code).

    Args:
        fraction: `Controller.adversarial_fraction`.
        microbatch: Samples of the micro-batch.

    Returns:
        The whole part of the share, but 0 where the share is no more than one sample.
    """
    return int(microbatch * fraction) if fraction * microbatch > 1.0 else 0


def fgsm(
    loss: Callable[[torch.Tensor], torch.Tensor], inputs: torch.Tensor, epsilon: float = 0.005
) -> torch.Tensor:
    """Inputs moved by `epsilon` where it raises the loss most, within their own range.

    Put the model in eval mode for the call, so that its running statistics don't see these
    inputs. Parameters' `.grad` is not touched.

    Args:
        loss: Loss of the inputs given to it; the sum or the mean, only signs count.
        inputs: Real-valued samples, any shape.
        epsilon: Step of every element, in the inputs' unit.

    Returns:
        A new tensor. Elements whose gradient is not a number stay where they were.
    """
    moving = inputs.detach().clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(moving), moving)
    moved = inputs.detach() + epsilon * torch.nan_to_num(gradient).sign()
    return moved.clamp(inputs.min(), inputs.max())
