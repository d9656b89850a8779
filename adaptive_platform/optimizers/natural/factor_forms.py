"""A factor kept as a matrix, or as the few rows it is the product of, where that is smaller.

`A = R^T R` with R of shape `[rows, side]`, scaled so that no count is left over. What is not square
is rows: they are used up to half the side only, where they are cheaper to keep and to apply.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "as_matrix",
    "is_rows",
    "mean_diagonal",
    "most_rows",
    "reordered",
    "similar",
    "times",
    "widened",
]


def most_rows(side: int) -> int:
    """Up to how many rows applying a damped inverse costs no more than with the matrix."""
    return side // 2


def is_rows(value: Tensor) -> bool:
    """True for `[rows, side]`, False for `[side, side]`."""
    return value.shape[0] != value.shape[1]


def as_matrix(value: Tensor) -> Tensor:
    """The factor as `[side, side]`."""
    return value.T @ value if is_rows(value) else value


def times(value: Tensor, vector: Tensor) -> Tensor:
    """The factor times a vector `[side]`."""
    return value.T @ (value @ vector) if is_rows(value) else value @ vector


def mean_diagonal(value: Tensor) -> float:
    """`tr A / side`; a host synchronisation."""
    diagonal = value.square().sum() if is_rows(value) else value.diagonal().sum()
    return float(diagonal) / value.shape[1]


def similar(value: Tensor, reference: Tensor, tolerance: float) -> bool:
    """True when `|value - reference|_F < tolerance |reference|_F`; False for a zero reference.

    Args:
        value: A factor in either form.
        reference: Another of the same side, in either form.
        tolerance: alpha.
    """
    if not is_rows(value) and not is_rows(reference):
        distance, scale = (value - reference).norm(), reference.norm()
    else:
        scale = _inner(reference, reference).sqrt()
        square = _inner(value, value) - 2 * _inner(value, reference) + scale.square()
        distance = square.clamp(min=0.0).sqrt()
    far, size = torch.stack([distance, scale]).tolist()
    return size > 0.0 and far < tolerance * size


def widened(value: Tensor, columns: Tensor, side: int) -> Tensor:
    """The factor of a layer that got more columns, which were zero until now.

    Args:
        value: In either form.
        columns: Where today's columns go, shape `[value.shape[1]]`.
        side: Columns in all.
    """
    if is_rows(value):
        wide = value.new_zeros(value.shape[0], side)
        wide[:, columns] = value
    else:
        wide = value.new_zeros(side, side)
        wide[columns[:, None], columns] = value
    return wide


def reordered(value: Tensor, order: Tensor) -> Tensor:
    """The factor, in its form, with column `order[i]` in place i.

    Args:
        value: In either form.
        order: Shape `[value.shape[1]]`.
    """
    return value[:, order] if is_rows(value) else value[order][:, order]


def _inner(left: Tensor, right: Tensor) -> Tensor:
    """`<left, right>_F`, 0-dim, by way of the smaller product."""
    if is_rows(left) and is_rows(right):
        return (left @ right.T).square().sum()
    if is_rows(left):
        return ((left @ right) * left).sum()
    if is_rows(right):
        return ((right @ left) * right).sum()
    return (left * right).sum()
