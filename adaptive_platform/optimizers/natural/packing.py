"""Symmetric matrices as their lower triangle, for the wire and for checkpoints."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["pack", "packed_length", "side_of", "unpack"]


def packed_length(side: int) -> int:
    """Elements of a packed `side x side` matrix."""
    return side * (side + 1) // 2


def side_of(length: int) -> int:
    """Rows of the matrix that was packed into `length` elements.

    Raises:
        ValueError: No matrix has that many.
    """
    side = (math.isqrt(8 * length + 1) - 1) // 2
    if packed_length(side) != length:
        raise ValueError(f"{length} elements are not the triangle of a matrix")
    return side


def pack(matrix: Tensor) -> Tensor:
    """The lower triangle row by row: element (i, j), j <= i, at i (i + 1) / 2 + j.

    Args:
        matrix: Shape `[n, n]`, symmetric; what lies above the diagonal is not looked at.
    """
    return matrix.masked_select(_lower(matrix.shape[0], matrix.device))


def unpack(packed: Tensor) -> Tensor:
    """The symmetric matrix of a packed vector; exactly symmetric."""
    side = side_of(packed.numel())
    lower = packed.new_zeros(side, side)
    lower.masked_scatter_(_lower(side, packed.device), packed)
    return lower + lower.tril(-1).T


def _lower(side: int, device: torch.device) -> Tensor:
    return torch.ones(side, side, dtype=torch.bool, device=device).tril()
