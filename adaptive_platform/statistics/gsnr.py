"""Element-wise gradient signal-to-noise ratio and the gradients that it reduces (VRGD)."""

from __future__ import annotations

import torch

__all__ = [
    "elementwise_gsnr",
    "gsnr_in_place",
    "gsnr_of_means",
    "gsnr_reduced_gradient",
    "reduction_ratio",
]

_NOISE_FLOOR = 1e-6
"""Least variance of an element relative to its squared mean: below it float32 sees rounding."""
_TINY = torch.finfo(torch.float32).tiny


def elementwise_gsnr(
    total: torch.Tensor, total_of_squares: torch.Tensor, count: int
) -> torch.Tensor:
    """Squared mean over variance of each gradient element, across devices.

    `gbar^2 / s2` with `s2` the biased variance of device means (Jiang et al. 2023,
    arXiv 2309.13681). A (worker, micro-batch) pair is one device; all must have the same size.
    The ratio ends at 1e6, where float32 can no longer tell `s2` from rounding, so devices that
    agree give a finite, uniform ratio; an element whose gradients are all zero gives 0.

    Args:
        total: `sum_d g_d` over the devices, any shape.
        total_of_squares: `sum_d g_d^2`, of the same shape.
        count: Number of devices, >= 2.

    Returns:
        The ratio in float32, of the same shape.

    Raises:
        ValueError: Fewer than two devices.
    """
    if count < 2:
        raise ValueError(f"count = {count}: a variance needs at least 2 devices")
    return gsnr_of_means(total.float() / count, total_of_squares.float() / count)


def gsnr_of_means(mean: torch.Tensor, mean_square: torch.Tensor) -> torch.Tensor:
    """`elementwise_gsnr` of what is divided by the number of devices already.

    Args:
        mean: Mean gradient over the devices, float32, any shape.
        mean_square: Mean of the devices' squared gradients.
    """
    squared_mean = mean.square()
    variance = mean_square - squared_mean
    torch.maximum(variance, _NOISE_FLOOR * squared_mean, out=variance)
    # In place, as each copy of a large layer costs as much as its arithmetic; 0 / tiny is 0.
    return squared_mean.div_(variance.clamp_(min=_TINY))


@torch.no_grad()
def gsnr_in_place(
    gradient: torch.Tensor, squares: torch.Tensor, scale: float, scratch: torch.Tensor
) -> None:
    """`gsnr_of_means` written over the squares, with few passes over them.

    Args:
        gradient: Any multiple of the mean gradient, 1-D.
        squares: The multiple of the mean squared gradients, float32 (same length), that makes
            `scale * gradient^2` the same multiple of the squared mean; overwritten by the ratio.
        scale: That factor.
        scratch: Float32 of that length at least; what it holds afterwards means nothing.
    """
    squared_mean = scratch[: gradient.numel()]
    gradient = gradient.float()
    torch.addcmul(scratch.new_zeros(()), gradient, gradient, value=scale, out=squared_mean)
    variance = squares.sub_(squared_mean).clamp_(min=_TINY)
    # Ending the ratio is the same as a floor under the variance, and one pass less.
    torch.div(squared_mean, variance, out=squares).clamp_(max=1.0 / _NOISE_FLOOR)


def reduction_ratio(
    gsnr: torch.Tensor, gamma: float = 0.1, layer_mean: torch.Tensor | None = None
) -> torch.Tensor:
    """GSNR of one layer, divided by the layer's mean and clipped to [gamma, 1].

    Args:
        gsnr: Ratios of one layer, or of the part of it that lies on this shard.
        gamma: Least multiplier, in (0, 1]; 1 gives plain SGD.
        layer_mean: Mean over the whole layer, where `gsnr` is only a part of it.

    Returns:
        Multipliers of the shape of `gsnr`; `gamma` throughout for a layer without gradient.

    Raises:
        ValueError: `gamma` outside (0, 1].
    """
    if not 0.0 < gamma <= 1.0:
        raise ValueError(f"gamma = {gamma}: must lie in (0, 1]")
    mean = gsnr.mean() if layer_mean is None else layer_mean
    return (gsnr / mean.clamp(min=_TINY)).clamp_(gamma, 1.0)


def gsnr_reduced_gradient(
    total: torch.Tensor, total_of_squares: torch.Tensor, count: int, gamma: float = 0.1
) -> torch.Tensor:
    """`r * gbar` of one layer: what VR-SGD applies in the place of the mean gradient.

    Args:
        total: `sum_d g_d` over the devices, for one parameter.
        total_of_squares: `sum_d g_d^2`.
        count: Number of devices, >= 2; the paper uses 8 and more.
        gamma: Least multiplier, in (0, 1].

    Returns:
        A new float32 tensor; the inputs are not changed.
    """
    ratio = reduction_ratio(elementwise_gsnr(total, total_of_squares, count), gamma)
    return ratio * (total.float() / count)
