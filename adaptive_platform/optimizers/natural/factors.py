"""Sums from which curvature factors are made: plain sums over samples and positions of a batch.

Sums add up over micro-batches and workers, whatever their sizes; dividing comes after that.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = [
    "Taps",
    "all_taps",
    "input_products",
    "input_rows",
    "output_rows",
    "slides_row_by_row",
    "taps_in_use",
    "unit_wise_sum",
    "with_ones",
]

Taps = tuple[int, ...]
"""Kernel positions by number, row by row, in rising order; `(0,)` for a linear layer."""


def all_taps(module: nn.Linear | nn.Conv2d) -> Taps:
    """Every kernel position."""
    if isinstance(module, nn.Linear):
        return (0,)
    return tuple(range(module.kernel_size[0] * module.kernel_size[1]))


def taps_in_use(module: nn.Linear | nn.Conv2d, inputs: Tensor) -> Taps:
    """Kernel positions that meet the image at all; the others only ever see zero padding.

    A 3x3 kernel with padding on 1x1 images is a 1x1 kernel: eight ninths of its factor would be
    zeros, and the gradient there is zero.

    Args:
        module: The layer.
        inputs: Its input; only the shape counts.
    """
    if isinstance(module, nn.Linear):
        return (0,)
    if isinstance(module.padding, str) or module.padding_mode != "zeros":
        return all_taps(module)
    along = []
    for axis in (0, 1):
        size, kernel = inputs.shape[axis - 2], module.kernel_size[axis]
        stride, padding, dilation = (
            module.stride[axis],
            module.padding[axis],
            module.dilation[axis],
        )
        positions = (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
        along.append(
            [
                tap
                for tap in range(kernel)
                if any(0 <= p * stride + tap * dilation - padding < size for p in range(positions))
            ]
        )
    return tuple(y * module.kernel_size[1] + x for y in along[0] for x in along[1])


def input_rows(
    module: nn.Linear | nn.Conv2d,
    inputs: Tensor,
    dtype: torch.dtype,
    taps: Taps | None = None,
    *,
    by_tap: bool = False,
) -> Tensor:
    """What each output position of a layer saw, without bias column.

    Args:
        module: The layer.
        inputs: Its input, in any memory layout.
        dtype: Type of the result.
        taps: Only these kernel positions; all where None.
        by_tap: Columns by kernel position, then channel, as channels-last weights lie in memory.

    Returns:
        Shape `[positions, in_features]`, or `[positions, in_channels * taps]` with the order of
        `weight.flatten(1)`. Positions run over samples first. Padding counts as input.
    """
    if isinstance(module, nn.Linear):
        return inputs.to(dtype).reshape(-1, inputs.shape[-1])
    taps = all_taps(module) if taps is None else taps
    rows = _patches(module, _padded(module, inputs.to(dtype)), taps)
    if by_tap:
        return rows
    return rows.reshape(len(rows), len(taps), -1).transpose(1, 2).reshape(len(rows), -1)


def input_products(
    module: nn.Linear | nn.Conv2d,
    inputs: Tensor,
    dtype: torch.dtype,
    *,
    bias: bool,
    taps: Taps | None = None,
    by_tap: bool = False,
) -> Tensor:
    """`sum a a^T` over samples and positions of `input_rows`, with a last 1 in a for a bias.

    Args:
        module: The layer.
        inputs: Its input, in any memory layout.
        dtype: Type of sums and result.
        bias: The layer's bias is trained.
        taps: Only these kernel positions; all where None.
        by_tap: As for `input_rows`.

    Returns:
        Shape `[n, n]`, n as the columns of `input_rows`, plus one with a bias.
    """
    if isinstance(module, nn.Linear):
        rows = inputs.to(dtype).reshape(-1, inputs.shape[-1])
        return _products(with_ones(rows) if bias else rows)
    taps = all_taps(module) if taps is None else taps
    padded = _padded(module, inputs.to(dtype))
    if not bias and slides_row_by_row(module) and taps == all_taps(module):
        products = _sliding_products(module, padded)
    else:
        rows = _patches(module, padded, taps)
        products = _products(with_ones(rows) if bias else rows)
    return products if by_tap else _channels_first(products, len(taps), bias=bias)


def _products(rows: Tensor) -> Tensor:
    return rows.T @ rows


def _padded(module: nn.Conv2d, inputs: Tensor) -> Tensor:
    """Shape `[N, H, W, C]`, padded as the convolution does; a view where there is no padding."""
    if isinstance(module.padding, str) or module.padding_mode != "zeros":
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        inputs = F.pad(inputs, module._reversed_padding_repeated_twice, mode=mode)
        return inputs.permute(0, 2, 3, 1)
    down, across = module.padding
    inputs = inputs.permute(0, 2, 3, 1)
    return F.pad(inputs, (0, 0, across, across, down, down)) if down or across else inputs


def _patches(module: nn.Conv2d, padded: Tensor, taps: Taps) -> Tensor:
    """Rows in the order of kernel position, then channel: blocks of channels, cheap to copy."""
    (kh, kw), (sh, sw), (dh, dw) = module.kernel_size, module.stride, module.dilation
    height = (padded.shape[1] - dh * (kh - 1) - 1) // sh + 1
    width = (padded.shape[2] - dw * (kw - 1) - 1) // sw + 1
    slices = [
        padded[:, y * dh : y * dh + sh * height : sh, x * dw : x * dw + sw * width : sw]
        for y, x in (divmod(tap, kw) for tap in taps)
    ]
    # A slice may end short of its last stride; its length is right all the same.
    patches = torch.cat(slices, dim=-1) if len(slices) > 1 else slices[0]
    return patches.reshape(-1, patches.shape[-1])


def slides_row_by_row(module: nn.Conv2d) -> bool:
    """A kernel three rows high, padded by one row, that moves by one: a third of the work."""
    return (
        module.kernel_size[0] == 3
        and module.stride[0] == 1
        and module.dilation[0] == 1
        and module.padding_mode == "zeros"
        and not isinstance(module.padding, str)
        and module.padding[0] == 1
    )


def _sliding_products(module: nn.Conv2d, padded: Tensor) -> Tensor:
    """`sum a a^T` of a kernel three rows high that slides by one row, with a row of zero padding.

    Kernel rows d and d + s meet the same pairs of image rows for every d, as pairs with a row of
    padding add nothing. So three products replace nine; only for s = 0 one outer image row must be
    taken away, which the upper or lower kernel row never meets.
    """
    (_, kw), (_, sw), (_, dw) = module.kernel_size, module.stride, module.dilation
    image = padded[:, 1:-1].transpose(0, 1)  # image rows first: a shift is then a slice
    width = (image.shape[2] - dw * (kw - 1) - 1) // sw + 1
    slices = [image[:, :, x * dw : x * dw + sw * width : sw] for x in range(kw)]
    rows = torch.cat(slices, dim=-1).flatten(1, 2)
    height, per_row, columns = rows.shape
    flat = rows.reshape(height * per_row, columns)
    blocks = {}
    for shift in (1, 2):
        away = min(shift, height) * per_row
        blocks[shift] = flat[: len(flat) - away].T @ flat[away:]
    whole = flat.T @ flat
    diagonal = (whole - _products(rows[-1]), whole, whole - _products(rows[0]))
    result = flat.new_empty(3, columns, 3, columns)
    for upper in range(3):
        result[upper, :, upper] = diagonal[upper]
        for lower in range(upper + 1, 3):
            result[upper, :, lower] = blocks[lower - upper]
            result[lower, :, upper] = blocks[lower - upper].T
    return result.view(3 * columns, 3 * columns)


def _channels_first(products: Tensor, area: int, *, bias: bool) -> Tensor:
    """From the order of `_patches` to that of `weight.flatten(1)`; a bias stays last."""
    if area == 1:
        return products
    side = products.shape[0] - bias
    order = torch.arange(side, device=products.device).view(area, -1).T.flatten()
    if bias:
        order = torch.cat([order, order.new_tensor([side])])
    return products[order][:, order]


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
    own = module.training or module.running_mean is None or module.running_var is None
    mean, variance = (None, None) if own else (module.running_mean, module.running_var)
    if mean is not None and variance is not None:
        mean, variance = mean.to(dtype), variance.to(dtype)
    normalized = F.batch_norm(inputs, mean, variance, training=own, eps=module.eps)
    positions = tuple(range(2, inputs.dim()))
    of_scale, shift = normalized * gradients, gradients
    if positions:
        of_scale, shift = of_scale.sum(positions), shift.sum(positions)
    return torch.stack(
        [(of_scale * of_scale).sum(0), (of_scale * shift).sum(0), (shift * shift).sum(0)]
    )
