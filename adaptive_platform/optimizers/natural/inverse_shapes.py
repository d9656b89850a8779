"""Inverses as flat vectors, for the wire and for checkpoints."""

from __future__ import annotations

import torch
from torch import Tensor

from adaptive_platform.optimizers.natural.inverses import InverseMethod
from adaptive_platform.optimizers.natural.packing import pack, packed_length, unpack

__all__ = ["flat_inverse", "flat_length", "inverse_of"]


def flat_length(method: InverseMethod, side: int, rows: int) -> int:
    """Numbers of a flat inverse.

    Args:
        method: How it was made.
        side: Of the factor.
        rows: Those it was made of; 0 for a matrix.
    """
    if rows:
        return rows * side + 1
    return side + side * side if method == "eigen" else packed_length(side)


def flat_inverse(inverse: tuple[Tensor, ...]) -> Tensor:
    """What `inverse_of` reads back, bit for bit."""
    if len(inverse) == 1:
        return pack(inverse[0])
    return torch.cat([each.reshape(-1) for each in inverse])


def inverse_of(flat: Tensor, method: InverseMethod, side: int, rows: int) -> tuple[Tensor, ...]:
    """An inverse as the methods return it; arguments as for `flat_length`."""
    if rows:
        return flat[:-1].reshape(rows, side).clone(), flat[-1].clone()
    if method == "eigen":
        return flat[:side].clone(), flat[side:].reshape(side, side).clone()
    return (unpack(flat),)
