"""What batch normalization asks of the loop: a smallest batch, equal averages on all workers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = [
    "average_normalization",
    "is_convolutional",
    "normalization_buffers",
    "smallest_microbatch",
]


def is_convolutional(model: nn.Module) -> bool:
    """True with two 2-D convolutions or more; a transformer's patch embedding is only one."""
    return sum(isinstance(module, nn.Conv2d) for module in model.modules()) >= 2


def smallest_microbatch(model: nn.Module) -> int:
    """Samples that a forward pass needs while training: 2 with batch normalization, else 1.

    Batch normalization refuses a single value per channel, which one small image may come to; how
    small depends on the images, so this is on the safe side. Layers that are frozen (in eval mode
    with running averages) do not count: ask while the model is in training mode.
    """
    for module in model.modules():
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
            return 2
    return 1


def normalization_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Running averages and counters of batch normalization by name; the model's own tensors.

    A forward pass changes them before anyone knows whether the step counts: copy them first, and
    put them back when the step is dropped.
    """
    return {
        f"{name}.{key}" if name else key: buffer
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm)
        for key, buffer in module.named_buffers(recurse=False)
    }


@torch.no_grad()
def average_normalization(
    model: nn.Module, all_reduce: Callable[[Tensor], object], weight: float
) -> None:
    """Make the buffers of all workers' models agree, in one reduction.

    Running means are averaged by weight and running variances pooled, `E[var + mean^2] - mean^2`:
    the variance over everyone's samples, as the spread of the means counts too. Other float
    buffers are averaged; integers, such as the counter of batches seen, are averaged and rounded,
    ties to even; booleans are left alone. The sums run in float64.

    Call it before evaluation and before a checkpoint, on all workers together.

    Args:
        model: Its buffers are replaced in place. Buffer order must be the same everywhere.
        all_reduce: Replaces a flat float64 tensor by its sum over the workers.
        weight: Of this worker, such as its samples since the last call; >= 0. With weight 0 its
            buffers contribute nothing, not even a NaN; with 0 everywhere all stay as they are.
    """
    buffers = [
        b
        for b in model.buffers()
        # Expanded buffers can't be written to, and hold constants.
        if b.dtype is not torch.bool and not b.is_complex() and 0 not in b.stride()
    ]
    if not buffers:
        return
    pairs = [
        (module.running_mean, module.running_var)
        for module in model.modules()
        if isinstance(module, _BatchNorm) and module.running_mean is not None
    ]
    mean_of = {id(var): mean for mean, var in pairs}
    wide = {id(buffer): buffer.detach().double() for buffer in buffers}
    for mean, var in pairs:
        wide[id(var)] = wide[id(var)] + wide[id(mean)].square()
    parts = [wide[id(buffer)].flatten() for buffer in buffers]
    flat = torch.cat([*parts, parts[0].new_ones(1)])
    flat = flat * weight if weight else torch.zeros_like(flat)
    all_reduce(flat)
    total = float(flat[-1])
    if total == 0:
        return
    pooled = dict(
        zip(wide, (flat[:-1] / total).split([part.numel() for part in parts]), strict=True)
    )
    for buffer in buffers:
        value = pooled[id(buffer)]
        if id(buffer) in mean_of:
            value = (value - pooled[id(mean_of[id(buffer)])].square()).clamp(min=0)
        if not buffer.is_floating_point():
            value = value.round()
        buffer.copy_(value.view_as(buffer))
