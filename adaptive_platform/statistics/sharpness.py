"""How sharp a minimum is, for studies after training (Keskar et al. 2016, arXiv 1609.04836)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["LossAndGradient", "Sharpness", "Vector", "interpolate", "sharpness"]

Vector: TypeAlias = npt.NDArray[np.float64]
LossAndGradient: TypeAlias = Callable[[Vector], tuple[float, Vector]]
"""Mean training loss and its gradient at a flat parameter vector."""

_START = 0.01
"""Size of the random start, as a share of the box: the gradient at a minimum itself is zero."""
_FIRST_MOVE = 0.5
"""Share of the box that the steepest coordinate goes in the first iteration. L-BFGS-B takes the
gradient itself for its first step, which in a small box is lost in the rounding of the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharpness:
    """How far the loss rises in a small box around the parameters."""

    value: float
    """`100 (max f - f(x)) / (1 + f(x))`, >= 0: percent."""
    loss: float
    """f(x)."""
    highest_loss: float
    """The highest finite loss that was met in the box."""


def sharpness(
    loss: LossAndGradient,
    parameters: Vector,
    *,
    epsilon: float = 1e-3,
    directions: Vector | None = None,
    iterations: int = 10,
    seed: int = 0,
) -> Sharpness:
    """Maximize the loss in the box, as far as L-BFGS-B comes in a few iterations.

    Args:
        loss: Mean loss over the full training set, in eval mode.
        parameters: x, flat, of length n.
        epsilon: Relative half-width of the box; the paper uses 1e-3 and 5e-4.
        directions: Columns that span the random subspace, n x p (the paper: p = 100). None: the
            full space.
        iterations: L-BFGS-B iterations, 10 in the paper. The maximum is inexact.
        seed: Of the random start inside the box.

    Raises:
        ValueError: The loss at `parameters` is non-finite, or `epsilon` is not above 0.
    """
    from scipy.optimize import minimize

    if not epsilon > 0.0:
        raise ValueError(f"epsilon = {epsilon}: must be above 0")
    base = loss(parameters)[0]
    if not math.isfinite(base):
        raise ValueError(f"the loss at the given parameters is {base}: there is nothing to compare")
    coordinates = parameters
    if directions is not None:
        coordinates = np.asarray(
            np.linalg.lstsq(directions, parameters, rcond=None)[0], dtype=np.float64
        )
    half_width = epsilon * (np.abs(coordinates) + 1.0)
    highest, factor = base, 1.0

    def negated(share: Vector) -> tuple[float, Vector]:
        nonlocal highest
        step = half_width * share
        value, gradient = loss(parameters + (step if directions is None else directions @ step))
        if math.isfinite(value):
            highest = max(highest, value)
        slope = gradient if directions is None else directions.T @ gradient
        return -factor * value, -factor * half_width * slope

    start = _START * np.random.default_rng(seed).uniform(-1.0, 1.0, len(coordinates))
    steepest = float(np.abs(negated(start)[1]).max())
    if 0.0 < steepest < math.inf:
        factor = _FIRST_MOVE / steepest
    minimize(
        negated,
        start,
        jac=True,
        method="L-BFGS-B",
        bounds=[(-1.0, 1.0)] * len(coordinates),
        options={"maxiter": iterations, "ftol": 0.0, "gtol": 0.0},
    )
    return Sharpness(value=100.0 * (highest - base) / (1.0 + base), loss=base, highest_loss=highest)


def interpolate(
    small_batch: Vector, large_batch: Vector, alpha: float, *, curved: bool = False
) -> Vector:
    """A point on the line, or quarter circle, through two solutions, for a parametric plot.

    Args:
        small_batch: Parameters at alpha = 0.
        large_batch: Parameters at alpha = 1.
        alpha: Position; the paper plots -1 to 2.
        curved: Take `sin(alpha pi/2)` and `cos(alpha pi/2)` as weights.
    """
    if curved:
        angle = alpha * math.pi / 2.0
        return math.sin(angle) * large_batch + math.cos(angle) * small_batch
    return alpha * large_batch + (1.0 - alpha) * small_batch
