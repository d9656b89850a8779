"""Top of the loss's spectrum, by power iteration and by Lanczos, from Hessian-vector products."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

__all__ = ["Eigenvalue", "VectorMap", "hessian_vector_product", "lanczos", "power_iteration"]

VectorMap = Callable[[torch.Tensor], torch.Tensor]
"""A flat vector in, a flat vector of the same length out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Eigenvalue:
    """The eigenvalue of largest magnitude."""

    value: float
    """May be negative; 0 where the Hessian maps the start to zero."""
    iterations: int
    """Hessian-vector products taken."""
    converged: bool
    """True when the last two values agree within the tolerance."""


def hessian_vector_product(
    loss: Callable[[], torch.Tensor], parameters: Sequence[torch.Tensor]
) -> VectorMap:
    """The product of the loss's Hessian with a flat vector, by differentiating twice.

    The first derivative is taken once and its graph is kept as long as the returned function, so
    all products belong to the same parameters and the same probe batch. Put the model in eval
    mode first: batch statistics would couple the samples. `.grad` is not touched. Parameters that
    the loss does not use, or uses linearly, have zeros. Products come in the vector's type,
    whatever that of the parameters.

    Args:
        loss: Computes the mean loss on the probe batch.
        parameters: The tensors that the loss is differentiated by, in the order of the vector.
    """
    first = torch.autograd.grad(loss(), parameters, create_graph=True, materialize_grads=True)
    sizes = [parameter.numel() for parameter in parameters]

    def product(vector: torch.Tensor) -> torch.Tensor:
        parts = [
            v.view_as(p).to(p.dtype) for v, p in zip(vector.split(sizes), parameters, strict=True)
        ]
        curved = [(g, part) for g, part in zip(first, parts, strict=True) if g.requires_grad]
        if not curved:
            return torch.zeros_like(vector)
        second = torch.autograd.grad(
            [g for g, _ in curved],
            parameters,
            grad_outputs=[part for _, part in curved],
            retain_graph=True,
            materialize_grads=True,
        )
        return torch.cat([part.reshape(-1).to(vector.dtype) for part in second])

    return product


def power_iteration(
    product: VectorMap,
    start: torch.Tensor,
    *,
    all_reduce: VectorMap | None = None,
    iterations: int = 10,
    tolerance: float = 1e-2,
) -> Eigenvalue:
    """Eigenvalue of largest magnitude (Yao et al. 2018, arXiv 1810.01021, released code).

    Args:
        product: `H v` for a flat vector `v`; on several workers each one's own share of it.
        start: Random normal vector, the same on every worker; fixes the result.
        all_reduce: Makes the mean of the workers' products. None: there is one worker.
        iterations: Most products, >= 1.
        tolerance: Relative change of the Rayleigh quotient at which to stop.

    Raises:
        ValueError: `start` is zero or non-finite, or no iteration is allowed.
    """
    if iterations < 1:
        raise ValueError(f"iterations = {iterations}: must be at least 1")
    vector, value = _unit(start), math.nan
    for done in range(1, iterations + 1):
        image = product(vector)
        image = image if all_reduce is None else all_reduce(image)
        before, value = value, float(vector @ image)
        norm = float(image.norm())
        if norm == 0.0 or abs(value - before) < tolerance * abs(before):
            return Eigenvalue(value=value, iterations=done, converged=True)
        vector = image / norm
    return Eigenvalue(value=value, iterations=iterations, converged=False)


def lanczos(
    product: VectorMap,
    start: torch.Tensor,
    *,
    all_reduce: VectorMap | None = None,
    steps: int = 10,
) -> list[float]:
    """Ritz values in rising order: estimates of both ends of the spectrum, signs included.

    Full re-orthogonalization, so `steps` vectors of the start's size are kept. Ends early when
    the vectors span an invariant space; the values are then exact eigenvalues.

    Args:
        product: `H v` for a flat vector `v`; on several workers each one's own share of it.
        start: Random normal vector, the same on every worker.
        all_reduce: Makes the mean of the workers' products. None: there is one worker.
        steps: Most products, >= 1.

    Raises:
        ValueError: `start` is zero or non-finite, or no step is allowed.
    """
    if steps < 1:
        raise ValueError(f"steps = {steps}: must be at least 1")
    basis = [_unit(start)]
    diagonal: list[float] = []
    beside: list[float] = []
    for _ in range(min(steps, start.numel())):
        image = product(basis[-1])
        image = image if all_reduce is None else all_reduce(image)
        diagonal.append(float(basis[-1] @ image))
        scale = float(image.norm())
        # Twice is enough: one pass leaves what rounding of the first dot products hid.
        for _ in range(2):
            for known in basis:
                image = image - (known @ image) * known
        length = float(image.norm())
        if len(diagonal) == steps or length <= 1e-6 * max(scale, abs(diagonal[0])):
            break
        beside.append(length)
        basis.append(image / length)
    off = torch.tensor(beside[: len(diagonal) - 1], dtype=torch.float64)
    matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    matrix += torch.diag(off, 1) + torch.diag(off, -1)
    return [float(value) for value in torch.linalg.eigvalsh(matrix)]


def _unit(start: torch.Tensor) -> torch.Tensor:
    norm = start.norm()
    if not bool(torch.isfinite(norm)) or float(norm) == 0.0:
        raise ValueError(f"start has norm {float(norm)}: must be a random, non-zero vector")
    return start / norm
