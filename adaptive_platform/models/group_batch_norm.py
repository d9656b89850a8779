"""Batch normalization whose statistics span several workers, exact for shares of any size.

Ying et al. 2018 (arXiv 1811.06992): a fixed number of workers normalizes together, so that the
batch that statistics come from depends neither on the worker count nor on the batch per worker.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from adaptive_platform.models.replacement import adopt_parameters

__all__ = ["GroupBatchNorm", "group_batch_norm", "normalization_group"]

AllReduce = Callable[[Tensor], object]
"""Replaces a tensor by its sum over the members of the group."""


def normalization_group(rank: int, world_size: int, size: int) -> tuple[int, ...]:
    """Ranks that normalize together with `rank`: consecutive ones, in groups as equal as can be.

    Args:
        rank: In [0, world_size).
        world_size: Workers.
        size: Most workers per group; where it does not divide, groups differ by at most one.
    """
    groups = -(-world_size // size)
    edges = [world_size * index // groups for index in range(groups + 1)]
    index = next(i for i in range(groups) if rank < edges[i + 1])
    return tuple(range(edges[index], edges[index + 1]))


def _alone(tensor: Tensor) -> object:
    return tensor


class _Normalize(torch.autograd.Function):
    """`xhat` from the group's mean and variance; backward sums over the group as well."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, eps: float, all_reduce: AllReduce
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = torch.promote_types(inputs.dtype, torch.float32)
        x = inputs.to(wide)
        channels = x.shape[1]
        positions = x.numel() // channels
        # Mean and variance first and then their sums, in float64: `E[x^2] - E[x]^2` is safe so.
        sums = torch.zeros(2 * channels + 1, dtype=torch.float64, device=x.device)
        if positions:
            variance, mean = torch.var_mean(x, dim=_all_but_channels(x), correction=0)
            mean = mean.double()
            moments = torch.cat([mean, variance.double() + mean.square(), mean.new_ones(1)])
            sums = moments * positions
        all_reduce(sums)
        count = sums[-1]
        mean, square = (sums[:-1] / count).split(channels)
        variance = (square - mean.square()).clamp(min=0.0)
        scale = (variance + eps).rsqrt().to(wide)
        normalized = (x - _shaped(mean.to(wide), x)) * _shaped(scale, x)
        ctx.all_reduce = all_reduce
        ctx.save_for_backward(normalized, scale, count)
        ctx.mark_non_differentiable(mean, variance, count)
        return normalized.to(inputs.dtype), mean.to(wide), variance.to(wide), count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor, None, None]:
        normalized, scale, count = ctx.saved_tensors
        g = gradient.to(normalized.dtype)
        dims = _all_but_channels(g)
        sums = torch.cat([g.sum(dims), (g * normalized).sum(dims)]).double()
        ctx.all_reduce(sums)
        mean, slope = (sums / count).to(g.dtype).split(g.shape[1])
        result = (g - _shaped(mean, g) - normalized * _shaped(slope, g)) * _shaped(scale, g)
        return result.to(gradient.dtype), None, None


def group_batch_norm(
    inputs: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    all_reduce: AllReduce,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normalize with the statistics of everyone's inputs; differentiable once.

    Every member calls it equally often and in the same order, forward and backward; a member
    without samples passes an empty batch and back-propagates it. The gradients of weight and bias
    are this member's own sums: whoever sums gradients over workers sums them too.

    Args:
        inputs: `[N, C, ...]`; N may differ between members and be 0.
        weight: Scale `[C]`, or None.
        bias: Shift `[C]`, or None.
        eps: Added to the variance.
        all_reduce: Sums over the group in place; called once forward with `2 C + 1` numbers in
            float64, and once backward with `2 C`.

    Returns:
        Output, and the group's mean `[C]`, biased variance `[C]` and count of values per channel.
    """
    normalized, mean, variance, count = _Normalize.apply(inputs, eps, all_reduce)
    if weight is not None:
        normalized = normalized * _shaped(weight.to(normalized.dtype), normalized)
    if bias is not None:
        normalized = normalized + _shaped(bias.to(normalized.dtype), normalized)
    return normalized, mean, variance, count


class GroupBatchNorm(_BatchNorm):
    """Batch normalization over a group of workers; names and buffers as torch's.

    Evaluation uses the running averages, as torch's does.
    """

    def __init__(self, old: _BatchNorm, all_reduce: AllReduce) -> None:
        """Take the place of `old`.

        Args:
            old: Its parameters and buffers are taken over.
            all_reduce: Sums over the group in place.
        """
        affine = old.affine
        super().__init__(old.num_features, old.eps, old.momentum, affine, old.track_running_stats)
        adopt_parameters(self, old)
        self._all_reduce = all_reduce

    def leave(self) -> None:
        """Normalize alone from now on."""
        self._all_reduce = _alone

    def forward(self, input: Tensor) -> Tensor:
        """Map `[N, C, ...]` to the same shape."""
        if not self.training and self.running_mean is not None:
            return F.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
            )
        output, mean, variance, count = group_batch_norm(
            input, self.weight, self.bias, self.eps, self._all_reduce
        )
        if self.training:
            update_running_averages(self, mean, variance, count)
        return output

    def _check_input_dim(self, input: Tensor) -> None:
        """Any number of positions per sample."""


@torch.no_grad()
def update_running_averages(
    layer: _BatchNorm, mean: Tensor, variance: Tensor, count: Tensor
) -> None:
    """What torch does after a training pass: `running <- (1 - m) running + m new`.

    Args:
        layer: Its buffers are changed in place, where it has some.
        mean: Of the batch, `[C]`.
        variance: Of the batch, biased, `[C]`; the running one is unbiased.
        count: Values per channel, 0-dim.
    """
    if layer.running_mean is None or layer.running_var is None:
        return
    assert layer.num_batches_tracked is not None
    layer.num_batches_tracked.add_(1)
    momentum: Tensor | float
    if layer.momentum is None:
        momentum = 1.0 / layer.num_batches_tracked.to(layer.running_mean.dtype)
    else:
        momentum = layer.momentum
    unbiased = variance * (count / (count - 1).clamp(min=1)).to(variance.dtype)
    for running, new in ((layer.running_mean, mean), (layer.running_var, unbiased)):
        running.add_((new.to(running.dtype) - running) * momentum)


def _all_but_channels(tensor: Tensor) -> list[int]:
    return [dim for dim in range(tensor.dim()) if dim != 1]


def _shaped(values: Tensor, like: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (like.dim() - 2))
