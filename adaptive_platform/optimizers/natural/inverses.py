"""Damped inverses of symmetric factors, and what to try when one fails.

Three ways: Cholesky, eigen-decomposition, and Newton-Schulz, which is matrix products only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from adaptive_platform.optimizers.natural.factor_forms import reordered, times

__all__ = [
    "InverseMethod",
    "cholesky_inverse",
    "eigen_decomposition",
    "kronecker_solve",
    "newton_schulz_inverse",
    "reordered_inverse",
    "robust_inverse",
    "row_inverse",
]

InverseMethod = Literal["cholesky", "eigen", "newton_schulz"]

_LADDER = ((1.0, False), (10.0, False), (1.0, True), (10.0, True))
"""Factor on the damping, and whether in float64; in the order they are tried."""
_PROBE_TOLERANCE = 0.05
"""Largest error of `A A^-1 v - v` relative to |v| that still counts as an inverse."""


def cholesky_inverse(matrix: Tensor, damping: float) -> tuple[Tensor, ...]:
    """`(matrix + damping I)^-1`; holds NaN where the damped matrix is not positive definite.

    Args:
        matrix: Symmetric, shape `[n, n]`.
        damping: Added to the diagonal.

    Returns:
        The inverse alone, as a tuple, so that all methods give tuples of tensors.
    """
    factor, info = torch.linalg.cholesky_ex(_damped(matrix, damping))
    inverse = torch.cholesky_inverse(factor)
    return (inverse.masked_fill(info != 0, torch.nan),)


def row_inverse(rows: Tensor, damping: float) -> tuple[Tensor, ...]:
    """`(R^T R + damping I)^-1 = (I - V^T V) / damping`, by the Woodbury identity.

    With `L L^T = R R^T + damping I` and `V = L^-1 R`: nothing of the factor's own size is made.

    Args:
        rows: R, shape `[rows, n]`.
        damping: Added to the diagonal; > 0.

    Returns:
        V and `1 / damping`; NaN where the damped product is not positive definite.
    """
    lower, info = torch.linalg.cholesky_ex(_damped(rows @ rows.T, damping))
    inner = torch.linalg.solve_triangular(lower, rows, upper=False)
    return inner.masked_fill(info != 0, torch.nan), rows.new_tensor(1.0 / damping)


def newton_schulz_inverse(
    matrix: Tensor,
    damping: float,
    start: Tensor | None = None,
    tolerance: float = 1e-6,
    iterations: int = 60,
) -> tuple[Tensor, ...]:
    """`(matrix + damping I)^-1` by `M' = 2 I - M; X <- X M'; M <- M' M` (coupled Newton, root 1).

    The residual `I - A X` squares in every round. Float32 stalls above a condition of about 1e6.

    Args:
        matrix: Symmetric positive semi-definite, shape `[n, n]`.
        damping: Added to the diagonal.
        start: An inverse of a similar matrix, used where `|I - A X|_F < 1`.
        tolerance: Largest entry of `M - I` at which to stop; raised to what the type can hold.
        iterations: Most rounds; NaN where they do not suffice.
    """
    damped = _damped(matrix, damping)
    identity = torch.eye(matrix.shape[0], dtype=matrix.dtype, device=matrix.device)
    tolerance = max(tolerance, 16 * torch.finfo(matrix.dtype).eps * matrix.shape[0] ** 0.5)
    inverse = identity / damped.norm()
    if start is not None and bool((identity - damped @ start).norm() < 1.0):
        inverse = start
    residual = damped @ inverse
    for _ in range(iterations):
        correction = 2 * identity - residual
        inverse = inverse @ correction
        residual = correction @ residual
        error = float((residual - identity).abs().max())
        if error < tolerance:
            return ((inverse + inverse.T) / 2,)
        if not error < 1e6:
            break
    return (torch.full_like(matrix, torch.nan),)


def eigen_decomposition(matrix: Tensor, damping: float) -> tuple[Tensor, ...]:
    """Eigenvalues `[n]`, clipped at 0, and eigenvectors `[n, n]` in columns.

    Args:
        matrix: Symmetric, shape `[n, n]`.
        damping: Not added, as `kronecker_solve` adds it to products of eigenvalues; it tells how
            far eigenvalues may be off.
    """
    values, vectors = torch.linalg.eigh(matrix)
    return values.clamp(min=0.0), vectors.contiguous()


def kronecker_solve(
    gradient: Tensor,
    input_inverse: tuple[Tensor, ...],
    output_inverse: tuple[Tensor, ...],
    damping: float,
) -> Tensor:
    """Precondition a layer's gradient by what the inverse methods gave for A and G.

    Inverses of matrices or rows: `G^-1 dW A^-1`, damped already. Eigen:
    `Qg (Qg^T dW Qa / (dg da^T + lam)) Qa^T`, the exact inverse of `A (x) G + lam I` (KAISA, arXiv
    2107.01739).

    Args:
        gradient: dW, shape `[out, in]`.
        input_inverse: Of A, `[in, in]`.
        output_inverse: Of G, `[out, out]`.
        damping: lam, used by the eigen form only.
    """
    if not _is_eigen(input_inverse):
        return _times(_times(gradient, input_inverse).T, output_inverse).T
    (input_values, input_vectors), (output_values, output_vectors) = input_inverse, output_inverse
    rotated = output_vectors.T @ gradient @ input_vectors
    rotated /= torch.outer(output_values, input_values) + damping
    return output_vectors @ rotated @ input_vectors.T


def reordered_inverse(inverse: tuple[Tensor, ...], order: Tensor | None) -> tuple[Tensor, ...]:
    """That of a factor whose column `order[i]` went to place i; None leaves all in place."""
    if order is None:
        return inverse
    if len(inverse) == 1:
        return (reordered(inverse[0], order),)
    if _is_eigen(inverse):
        return inverse[0], inverse[1][order]
    return inverse[0][:, order], inverse[1]


def _is_eigen(inverse: tuple[Tensor, ...]) -> bool:
    return len(inverse) == 2 and inverse[0].dim() == 1


def _times(matrix: Tensor, inverse: tuple[Tensor, ...]) -> Tensor:
    """`matrix @ inverse` for an inverse of a matrix or of rows."""
    if len(inverse) == 1:
        return matrix @ inverse[0]
    inner, scale = inverse
    return torch.addmm(matrix, matrix @ inner.T, inner, alpha=-1.0).mul_(scale)


def robust_inverse(
    matrix: Tensor,
    damping: float,
    invert: Callable[[Tensor, float], tuple[Tensor, ...]],
) -> tuple[Tensor, ...] | None:
    """Invert; on an error, a non-finite or a wrong result, try more damping, then float64.

    Args:
        matrix: Symmetric, shape `[n, n]`, or its rows, `[rows, n]`.
        damping: For the first try; the second and last have ten times as much.
        invert: One of the methods, for the form of `matrix`.

    Returns:
        Tensors of the matrix's type; None where every try failed.
    """
    for factor, wide in _LADDER:
        trial = matrix.double() if wide else matrix
        if factor > 1.0 and invert is eigen_decomposition:
            trial = _damped(trial, factor * damping)
        try:
            found = invert(trial, factor * damping)
        except RuntimeError:  # torch.linalg.LinAlgError is one
            continue
        if _holds(trial, factor * damping, found):
            return tuple(each.to(matrix.dtype) for each in found)
    return None


def _holds(matrix: Tensor, damping: float, found: tuple[Tensor, ...]) -> bool:
    """The result undoes the damped matrix on a probe vector; one host synchronisation."""
    probe = torch.cos(torch.arange(matrix.shape[1], device=matrix.device).to(matrix.dtype))
    if not _is_eigen(found):
        damped = times(matrix, probe) + damping * probe
        error = _times(damped.unsqueeze(0), found).squeeze(0) - probe
        allowed = _PROBE_TOLERANCE * probe.norm()
    else:
        values, vectors = found
        error = vectors @ (values * (vectors.T @ probe)) - matrix @ probe
        allowed = _PROBE_TOLERANCE * (matrix.norm() + damping) * probe.norm()
    finite = torch.stack([each.isfinite().all() for each in found]).all()
    return bool(finite & (error.norm() <= allowed))


def _damped(matrix: Tensor, damping: float) -> Tensor:
    damped = matrix.clone()
    damped.diagonal().add_(damping)
    return damped
