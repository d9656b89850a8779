from __future__ import annotations

import math

import numpy as np
import pytest

from adaptive_platform.statistics.sharpness import Vector, interpolate, sharpness


def quadratic(center: list[float], curvature: list[float], offset: float = 0.0):
    middle, scale = np.array(center), np.array(curvature)

    def loss(x: Vector) -> tuple[float, Vector]:
        return offset + float(0.5 * (scale * (x - middle) ** 2).sum()), scale * (x - middle)

    return loss


def test_worked_examples() -> None:
    one = sharpness(quadratic([2.0], [10.0]), np.array([2.0]))
    assert one.value == pytest.approx(0.0045, rel=1e-3)
    two = sharpness(quadratic([2.0, 0.0], [10.0, 1.0]), np.array([2.0, 0.0]))
    assert two.value == pytest.approx(0.00455, rel=1e-3)


def test_it_grows_with_the_box_and_shrinks_with_the_loss() -> None:
    at = np.array([2.0, -1.0])
    values = [
        sharpness(quadratic([2, -1], [10, 4]), at, epsilon=e).value for e in (5e-4, 1e-3, 1e-2)
    ]
    assert values == sorted(values)
    lifted = sharpness(quadratic([2, -1], [10, 4], offset=3.0), at)
    plain = sharpness(quadratic([2, -1], [10, 4]), at)
    assert lifted.value == pytest.approx(plain.value / 4, rel=1e-6)


def test_a_subspace_sees_only_its_directions() -> None:
    loss, at = quadratic([2.0, 0.0], [10.0, 1.0]), np.array([2.0, 0.0])
    flat = sharpness(loss, at, directions=np.array([[0.0], [1.0]]))
    assert flat.value == pytest.approx(100 * 0.5 * 1e-6, rel=1e-3)
    # A column of length 2 along the first axis: |A^+ x| = 1, so the half-width is eps (1 + 1).
    steep = sharpness(loss, at, directions=np.array([[2.0], [0.0]]))
    assert steep.value == pytest.approx(100 * 5 * (2 * 2e-3) ** 2, rel=1e-3)


def test_a_loss_that_rounds_like_float32_is_climbed_all_the_same() -> None:
    """A slope of 1e-4 over a thousand coordinates: one gradient step is below the rounding."""
    slope = np.full(1000, 1e-4)

    def loss(x: Vector) -> tuple[float, Vector]:
        return float(np.float32(2.0 + slope @ x)), slope

    found = sharpness(loss, np.zeros(1000), epsilon=1e-3)
    assert found.highest_loss - found.loss == pytest.approx(1e-3 * slope.sum(), rel=0.01)


def test_it_is_never_negative_and_repeats_with_its_seed() -> None:
    def peak(x: Vector) -> tuple[float, Vector]:
        return 1.0 - float(x @ x), -2.0 * x

    assert sharpness(peak, np.zeros(3)).value == 0.0
    loss, at = quadratic([0.1, 0.2], [1, 2]), np.array([0.0, 0.0])
    assert sharpness(loss, at, seed=3) == sharpness(loss, at, seed=3)


def test_non_finite_losses_in_the_box_are_not_taken_for_a_maximum() -> None:
    def wall(x: Vector) -> tuple[float, Vector]:
        return (math.inf if abs(x[0]) > 5e-4 else float(x @ x)), 2.0 * x

    assert math.isfinite(sharpness(wall, np.zeros(1)).value)
    with pytest.raises(ValueError, match="nothing to compare"):
        sharpness(lambda x: (math.nan, x), np.zeros(1))
    with pytest.raises(ValueError, match="epsilon"):
        sharpness(wall, np.zeros(1), epsilon=0.0)


def test_parametric_plots_meet_both_solutions() -> None:
    small, large = np.array([1.0, 0.0]), np.array([0.0, 2.0])
    alphas = np.linspace(-1, 2, 25)
    for curved in (False, True):
        assert interpolate(small, large, alphas[8], curved=curved) == pytest.approx(small)
        assert interpolate(small, large, alphas[16], curved=curved) == pytest.approx(large)
    assert interpolate(small, large, 2.0) == pytest.approx([-1, 4])
