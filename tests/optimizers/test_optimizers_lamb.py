"""LAMB against the formulas: worked example, NumPy transcription, invariances."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from adaptive_platform.optimizers.lamb import LAMB


@pytest.mark.parametrize("correction", [True, False])
@pytest.mark.parametrize("bounds", [None, (0.5, 2.0)])
def test_fifty_random_steps_follow_the_formula(
    correction: bool, bounds: tuple[float, float] | None
) -> None:
    rng = np.random.default_rng(1)
    shapes = [(4, 3), (2, 3, 3, 3), (3, 3)]
    weights = [rng.normal(size=shape) for shape in shapes]
    weights[2][:] = 0
    means = [np.zeros(shape) for shape in shapes]
    squares = [np.zeros(shape) for shape in shapes]
    params = [nn.Parameter(torch.tensor(w)) for w in weights]
    optimizer = LAMB(
        params, lr=0.02, weight_decay=0.1, bias_correction=correction, weight_norm_bounds=bounds
    )
    for step in range(1, 51):
        for i, param in enumerate(params):
            g = rng.normal(size=shapes[i])
            param.grad = torch.tensor(g)
            means[i] = 0.9 * means[i] + 0.1 * g
            squares[i] = 0.999 * squares[i] + 0.001 * g**2
            m = means[i] / (1 - 0.9**step) if correction else means[i]
            v = squares[i] / (1 - 0.999**step) if correction else squares[i]
            r = m / (np.sqrt(v) + 1e-6) + 0.1 * weights[i]
            weight, length = np.linalg.norm(weights[i]), np.linalg.norm(r)
            above = float(np.clip(weight, *bounds)) if bounds else weight
            weights[i] = weights[i] - 0.02 * (above / length if weight and length else 1.0) * r
        optimizer.step()
    for param, expected in zip(params, weights, strict=True):
        np.testing.assert_allclose(param.detach().numpy(), expected, rtol=1e-9, atol=1e-12)


def one_step(g: list[float], **options: Any) -> torch.Tensor:
    param = nn.Parameter(torch.tensor([[3.0, 4.0]], dtype=torch.float64))
    param.grad = torch.tensor([g], dtype=torch.float64)
    LAMB([param], **{"lr": 0.01, "eps": 1e-12, **options}).step()
    return param.detach()[0]


def test_worked_example() -> None:
    after = one_step([0.6, -0.8])
    expected = torch.tensor([2.96464466, 4.03535534], dtype=torch.float64)
    torch.testing.assert_close(after, expected, rtol=0, atol=1e-8)
    moved = (after - torch.tensor([3.0, 4.0], dtype=torch.float64)).norm()
    assert moved.item() == pytest.approx(0.01 * 5.0)


@given(st.floats(1e-3, 1e3))
def test_scaling_the_gradient_changes_nothing(scale: float) -> None:
    torch.testing.assert_close(one_step([0.6 * scale, -0.8 * scale]), one_step([0.6, -0.8]))


def test_excluded_groups_follow_adam() -> None:
    ours, theirs = (nn.Parameter(torch.tensor([1.0, -2.0])) for _ in range(2))
    optimizers = (
        LAMB([ours], lr=0.1, eps=1e-8, layerwise=False),
        torch.optim.Adam([theirs], lr=0.1, eps=1e-8),
    )
    for step in range(5):
        for param, optimizer in zip((ours, theirs), optimizers, strict=True):
            param.grad = torch.tensor([0.5 * step + 0.1, 1.0])
            optimizer.step()
    torch.testing.assert_close(ours, theirs)


def test_a_parameter_that_rests_keeps_its_own_count() -> None:
    busy, resting = (nn.Parameter(torch.ones(2, 2)) for _ in range(2))
    optimizer = LAMB([busy, resting], lr=0.1)
    for step in range(3):
        busy.grad = torch.ones(2, 2)
        resting.grad = torch.ones(2, 2) if step == 2 else None
        optimizer.step()
    assert (optimizer.state[busy]["step"], optimizer.state[resting]["step"]) == (3, 1)
