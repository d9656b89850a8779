"""What batch normalization uses at evaluation instead of moving averages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from adaptive_platform.models.modes import in_eval_mode

__all__ = ["recompute_statistics", "use_last_batch"]


def use_last_batch(model: nn.Module) -> None:
    """Let the buffers hold the last micro-batch's statistics (Akiba et al., arXiv 1711.04325).

    Their code averages them over the workers before each evaluation: `average_normalization`
    does, with the spread of the means counted in. A single micro-batch per worker is what the
    score then rests on, so with few workers it should be large.

    Args:
        model: The momentum of its batch-norm layers becomes 1.
    """
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.momentum = 1.0


@torch.no_grad()
def recompute_statistics(
    model: nn.Module,
    batches: Iterable[Tensor],
    all_reduce: Callable[[Tensor], object] = lambda tensor: tensor,
) -> None:
    """Replace running averages by the mean and variance over given inputs, all of equal weight.

    Each layer sees what training would give it: the layers before it normalize by the batch. Other
    layers are in evaluation mode meanwhile. Layers that no input reaches keep their buffers; so do
    those that are in evaluation mode inside a model that trains, as they are frozen.

    Args:
        model: Its buffers are replaced in place; mode and momentum are put back.
        batches: This worker's inputs, of any sizes above one sample; all workers together should
            see enough samples. May be empty on some workers.
        all_reduce: Sums a float64 tensor over the workers in place.
    """
    training = any(module.training for module in model.modules())
    layers = [
        module
        for module in model.modules()
        if isinstance(module, _BatchNorm)
        and module.running_mean is not None
        and (module.training or not training)
    ]
    if not layers:
        return
    sums = [
        torch.zeros(2 * layer.num_features + 1, dtype=torch.float64, device=_device(layer))
        for layer in layers
    ]
    handles = [
        layer.register_forward_pre_hook(partial(_add_moments, total))
        for layer, total in zip(layers, sums, strict=True)
    ]
    try:
        with in_eval_mode(model):
            for layer in layers:
                layer.train()
            for inputs in batches:
                model(inputs)
    finally:
        for handle in handles:
            handle.remove()
    flat = torch.cat(sums)
    all_reduce(flat)
    for layer, total in zip(layers, flat.split([len(each) for each in sums]), strict=True):
        count = float(total[-1])
        if count == 0:
            continue
        mean, square = (total[:-1] / count).split(layer.num_features)
        variance = (square - mean.square()).clamp(min=0.0) * (count / max(count - 1.0, 1.0))
        assert layer.running_mean is not None
        assert layer.running_var is not None
        layer.running_mean.copy_(mean)
        layer.running_var.copy_(variance)


def _add_moments(total: Tensor, module: nn.Module, args: tuple[Any, ...]) -> None:
    inputs = args[0].to(torch.promote_types(args[0].dtype, torch.float32))
    dims = [dim for dim in range(inputs.dim()) if dim != 1]
    variance, mean = torch.var_mean(inputs, dim=dims, correction=0)
    mean = mean.double()
    count = inputs.numel() / inputs.shape[1]
    total += count * torch.cat([mean, variance.double() + mean.square(), mean.new_ones(1)])


def _device(layer: _BatchNorm) -> torch.device:
    assert layer.running_mean is not None
    return layer.running_mean.device
