"""Sums from which curvature factors are made: plain sums over samples and positions of a batch.

Sums add up over micro-batches and workers, whatever their sizes; dividing comes after that.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["input_rows", "output_rows", "unit_wise_sum", "with_ones"]


def input_rows(module: nn.Linear | nn.Conv2d, inputs: Tensor, dtype: torch.dtype) -> Tensor:
    """What each output position of a layer saw, without bias column.

    Args:
        module: The layer.
        inputs: Its input, in any memory layout.
        dtype: Type of the result.

    Returns:
        Shape `[positions, in_features]`, or `[positions, in_channels * kh * kw]` with the order of
        `weight.flatten(1)`. Positions run over samples first. Padding counts as input.
    """
    inputs = inputs.to(dtype)
    if isinstance(module, nn.Linear):
        return inputs.reshape(-1, inputs.shape[-1])
    if module.kernel_size == (1, 1) and module.padding in ((0, 0), "valid"):
        rows, columns = module.stride
        inputs = inputs[:, :, ::rows, ::columns]
        return inputs.permute(0, 2, 3, 1).reshape(-1, inputs.shape[1])
    padding: tuple[int, ...] = (0, 0)
    if isinstance(module.padding, str) or module.padding_mode != "zeros":
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        inputs = F.pad(inputs, module._reversed_padding_repeated_twice, mode=mode)
    else:
        padding = module.padding
    patches = F.unfold(
        inputs, module.kernel_size, dilation=module.dilation, padding=padding, stride=module.stride
    )
    return patches.transpose(1, 2).reshape(-1, patches.shape[1])


def output_rows(module: nn.Linear | nn.Conv2d, gradients: Tensor, dtype: torch.dtype) -> Tensor:
    """Output gradients by position, in the order of `input_rows`; shape `[positions, out]`."""
    gradients = gradients.to(dtype)
    if isinstance(module, nn.Conv2d):
        gradients = gradients.permute(0, 2, 3, 1)
    return gradients.reshape(-1, gradients.shape[-1])


def with_ones(rows: Tensor) -> Tensor:
    """The rows with a column of ones at the end, the input that a bias sees."""
    return torch.cat([rows, rows.new_ones(rows.shape[0], 1)], dim=1)


def unit_wise_sum(
    module: _BatchNorm, inputs: Tensor, gradients: Tensor, dtype: torch.dtype
) -> Tensor:
    """Per channel, `sum_n` of the outer product of sample n's gradients of scale and shift.

    `dgamma_n = sum_t xhat g`, `dbeta_n = sum_t g`; SP-NGD's unit-wise Fisher before it is divided
    by the samples. The normalised input is computed again, since `(y - beta) / gamma` fails at
    gamma = 0.

    Args:
        module: Any torch batch normalization with scale and shift.
        inputs: Its input, `[N, C, ...]`.
        gradients: Of the loss per sample in its output, same shape.
        dtype: Type of the result.

    Returns:
        Shape `[3, C]`: squares of dgamma, products, squares of dbeta.
    """
    inputs, gradients = inputs.to(dtype), gradients.to(dtype)
    if inputs.dim() == 2:
        inputs, gradients = inputs.unsqueeze(-1), gradients.unsqueeze(-1)
    inputs, gradients = inputs.flatten(2), gradients.flatten(2)
    if module.training or module.running_mean is None or module.running_var is None:
        variance, mean = torch.var_mean(inputs.movedim(1, -1).flatten(0, -2), dim=0, correction=0)
    else:
        mean, variance = module.running_mean.to(dtype), module.running_var.to(dtype)
    scale = (variance + module.eps).rsqrt()
    shift = gradients.sum(-1)
    products = (inputs * gradients).sum(-1)
    of_scale = (products - mean * shift) * scale
    return torch.stack(
        [(of_scale * of_scale).sum(0), (of_scale * shift).sum(0), (shift * shift).sum(0)]
    )
