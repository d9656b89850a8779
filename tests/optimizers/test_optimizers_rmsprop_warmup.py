"""RMSprop warm-up: the transition curve, the first step, and pure SGD after it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from adaptive_platform.optimizers import set_lr
from adaptive_platform.optimizers.rmsprop_warmup import (
    RMSpropWarmup,
    RmspropWarmupConfig,
    sgd_share,
)


@pytest.mark.parametrize(
    ("epochs", "share"),
    [(0, 0.00916), (5, 0.06767), (10, 0.5), (11, 0.7), (12, 0.9), (12.5, 1.0), (90, 1.0)],
)
def test_share_of_sgd(epochs: float, share: float) -> None:
    assert sgd_share(epochs, center=10, period=5) == pytest.approx(share, abs=5e-6)


@given(st.floats(0, 30), st.floats(0, 30))
def test_the_share_never_falls(early: float, late: float) -> None:
    early, late = sorted((early, late))
    for slope in (1.0, 2.0):
        shares = [sgd_share(e, center=10, period=5, slope_factor=slope) for e in (early, late)]
        assert 0 < shares[0] <= shares[1] <= 1


def test_the_steep_form_is_there_after_a_quarter_period() -> None:
    optimizer = RmspropWarmupConfig(steep=True).build([("w", nn.Parameter(torch.ones(2, 2)))])
    optimizer.set_progress(11.25)
    assert optimizer.sgd_share == 1.0


def first_step(g: float, epochs: float, lr: float) -> float:
    param = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    param.grad = torch.full_like(param, g)
    optimizer = RMSpropWarmup([param], lr=lr)
    optimizer.set_progress(epochs)
    optimizer.step()
    return param.item()


def test_worked_first_step() -> None:
    assert first_step(2.0, 0.0, 6.4) == pytest.approx(-0.120193, abs=5e-7)


def test_at_rate_zero_nothing_moves_and_all_stays_finite() -> None:
    param = nn.Parameter(torch.ones(2, 2))
    optimizer = RMSpropWarmup([param], lr=0.0)
    param.grad = torch.ones(2, 2)
    optimizer.step()
    assert torch.equal(param.detach(), torch.ones(2, 2))
    set_lr(optimizer, 0.1)
    optimizer.step()
    assert param.isfinite().all()


def test_the_rmsprop_part_does_not_see_the_gradients_scale() -> None:
    shares = [first_step(g, 0.0, 1e-9) for g in (2.0, 20.0)]
    assert shares[0] == pytest.approx(shares[1], rel=1e-6)


def test_after_the_transition_it_is_momentum_sgd() -> None:
    ours, theirs = (nn.Parameter(torch.tensor([[1.0, -2.0]])) for _ in range(2))
    optimizers = (
        RMSpropWarmup([ours], lr=0.1, weight_decay=0.01),
        torch.optim.SGD([theirs], lr=0.1, momentum=0.9, weight_decay=0.01),
    )
    optimizers[0].set_progress(12.5)
    for step in range(5):
        for param, optimizer in zip((ours, theirs), optimizers, strict=True):
            param.grad = torch.tensor([[0.5 * step, 1.0]])
            optimizer.step()
    torch.testing.assert_close(ours, theirs)
