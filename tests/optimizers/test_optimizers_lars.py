"""LARS against the formulas: worked examples, NumPy transcriptions, invariances, guards."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import nn

from adaptive_platform.optimizers.lars import LARS, LarsForm

Array = NDArray[np.float64]
FORMS: list[LarsForm] = ["paper", "corrected", "unscaled", "clip"]


def reference(
    form: str, w: Array, v: Array, g: Array, lr: float, m: float, b: float, c: float, eps: float
) -> tuple[Array, Array]:
    """One step as the papers write it, on one layer."""
    weight, gradient = np.linalg.norm(w), np.linalg.norm(g)
    if form == "unscaled":
        h = g + b * w
        gradient = np.linalg.norm(h)
        both = weight > 0 and gradient > 0
        ratio = c * weight / (gradient + b * weight + eps) if both else 1.0
        v = m * v + h
        return w - lr * ratio * v, v
    both = weight > 0 and gradient > 0
    ratio = c * weight / (gradient + b * weight + eps) if both else 1.0
    if form == "paper":
        v = m * v + lr * ratio * (g + b * w)
        return w - v, v
    if form == "clip":
        ratio = min(ratio / lr, 1.0)
    v = m * v + ratio * (g + b * w)
    return w - lr * v, v


@pytest.mark.parametrize("form", FORMS)
def test_fifty_random_steps_follow_the_formula(form: LarsForm) -> None:
    rng = np.random.default_rng(0)
    shapes = [(4, 3), (2, 3, 3, 3), (5, 1), (3, 3)]
    weights = [rng.normal(size=shape) for shape in shapes]
    weights[3][:] = 0
    buffers = [np.zeros(shape) for shape in shapes]
    params = [nn.Parameter(torch.tensor(w)) for w in weights]
    settings: dict[str, Any] = {"m": 0.9, "b": 0.05, "c": 0.02, "eps": 1e-3}
    optimizer = LARS(
        params, lr=1.0, momentum=0.9, weight_decay=0.05, trust_coefficient=0.02, eps=1e-3, form=form
    )
    for step in range(50):
        lr = 0.01 * (1 + step % 7)
        optimizer.param_groups[0]["lr"] = lr
        for index, param in enumerate(params):
            g = rng.normal(size=shapes[index]) * (0.0 if index == 2 and step % 3 else 1.0)
            param.grad = torch.tensor(g)
            weights[index], buffers[index] = reference(
                form, weights[index], buffers[index], g, lr, **settings
            )
        optimizer.step()
    for param, expected in zip(params, weights, strict=True):
        np.testing.assert_allclose(param.detach().numpy(), expected, rtol=1e-10, atol=1e-13)


def one_step(w: list[float], g: list[float], **options: Any) -> torch.Tensor:
    param = nn.Parameter(torch.tensor([w], dtype=torch.float64))
    param.grad = torch.tensor([g], dtype=torch.float64)
    LARS([param], **{"lr": 1.0, "momentum": 0.9, **options}).step()
    return param.detach()[0]


def test_worked_example() -> None:
    after = one_step([3.0, 4.0], [0.6, 0.8], weight_decay=1e-4)
    torch.testing.assert_close(
        after, torch.tensor([2.9970, 3.9960], dtype=torch.float64), rtol=0, atol=1e-9
    )


def test_a_zero_gradient_leaves_only_the_decay() -> None:
    # unscaled: the decay is part of its gradient, so the ratio is 0.001 * 5 / (0.5 + 0.5)
    for form, ratio in (("paper", 1.0), ("corrected", 1.0), ("clip", 1.0), ("unscaled", 0.005)):
        after = one_step([3.0, 4.0], [0.0, 0.0], weight_decay=0.1, lr=0.5, form=form)
        left = torch.tensor([3.0, 4.0], dtype=torch.float64) * (1 - 0.5 * 0.1 * ratio)
        torch.testing.assert_close(after, left)


def test_zero_weights_move_by_the_whole_rate() -> None:
    for form in FORMS:
        after = one_step([0.0, 0.0], [0.6, -0.8], weight_decay=0.1, lr=0.5, form=form)
        torch.testing.assert_close(after, torch.tensor([-0.3, 0.4], dtype=torch.float64))


def test_clip_takes_the_smaller_of_ratio_and_rate() -> None:
    # ratio = 0.001 * 5 / 1 = 0.005
    for lr, rate in ((1.0, 0.005), (0.001, 0.001)):
        after = one_step([3.0, 4.0], [0.6, 0.8], lr=lr, form="clip")
        expected = torch.tensor([3 - 0.6 * rate, 4 - 0.8 * rate], dtype=torch.float64)
        torch.testing.assert_close(after, expected)
    assert one_step([3.0, 4.0], [0.6, 0.8], lr=0.0, form="clip").tolist() == [3.0, 4.0]


def trajectory(form: LarsForm, rates: list[float]) -> torch.Tensor:
    """Weights under a constant trust ratio: the gradient is parallel to the weights, c tiny."""
    param = nn.Parameter(torch.tensor([[3.0, 4.0]], dtype=torch.float64))
    optimizer = LARS([param], lr=1.0, form=form, trust_coefficient=1e-9)
    for rate in rates:
        optimizer.param_groups[0]["lr"] = rate
        param.grad = torch.tensor([[0.6, 0.8]], dtype=torch.float64)
        optimizer.step()
    return (param.detach()[0] - torch.tensor([3.0, 4.0], dtype=torch.float64)) * 1e9


def test_forms_coincide_at_a_constant_rate_and_part_when_it_moves() -> None:
    constant, moving = [0.5] * 4, [0.5, 0.5, 5.0, 5.0]
    for form in ("corrected", "unscaled"):
        torch.testing.assert_close(
            trajectory(form, constant), trajectory("paper", constant), rtol=1e-5, atol=0
        )
        torch.testing.assert_close(
            trajectory(form, moving), trajectory("unscaled", moving), rtol=1e-5, atol=0
        )
    assert not torch.allclose(trajectory("paper", moving), trajectory("unscaled", moving), rtol=0.1)


@given(st.sampled_from(FORMS[:3]), st.floats(1e-3, 1e3))
def test_scaling_the_gradient_changes_nothing(form: LarsForm, scale: float) -> None:
    plain = one_step([3.0, 4.0], [0.6, -0.3], form=form)
    scaled = one_step([3.0, 4.0], [0.6 * scale, -0.3 * scale], form=form)
    torch.testing.assert_close(scaled, plain)


@given(st.floats(0.1, 10.0))
def test_rate_and_coefficient_only_count_as_a_product(scale: float) -> None:
    plain = one_step([3.0, 4.0], [0.6, -0.3], lr=1.0)
    traded = one_step([3.0, 4.0], [0.6, -0.3], lr=scale, trust_coefficient=0.001 / scale)
    torch.testing.assert_close(plain, traded)


def test_excluded_parameters_see_the_rate_alone() -> None:
    for coefficient in (0.001, 1.0):
        after = one_step(
            [3.0, 4.0], [0.6, -0.3], lr=2.0, trust_coefficient=coefficient, layerwise=False
        )
        torch.testing.assert_close(after, torch.tensor([1.8, 4.6], dtype=torch.float64))


def test_excluded_groups_are_plain_momentum_sgd() -> None:
    for form in FORMS:
        ours = nn.Parameter(torch.tensor([1.0, -2.0]))
        theirs = nn.Parameter(torch.tensor([1.0, -2.0]))
        optimizers = (
            LARS([ours], lr=0.1, momentum=0.9, weight_decay=0.0, form=form, layerwise=False),
            torch.optim.SGD([theirs], lr=0.1, momentum=0.9),
        )
        for step in range(5):
            for param, optimizer in zip((ours, theirs), optimizers, strict=True):
                param.grad = torch.tensor([0.5 * step, 1.0])
                optimizer.step()
        torch.testing.assert_close(ours, theirs)
