from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from adaptive_platform.controllers import AnyMomentumRule
from adaptive_platform.controllers.momentum_rules import (
    CorrectMomentumConfig,
    HoldNoiseConfig,
    KeepMomentumConfig,
    MomentumContext,
    MomentumRuleConfig,
)
from adaptive_platform.settings import variants_of

STEP = MomentumContext(
    batch=128, base_batch=64, lr_factor=1.0, lr=0.1, previous_lr=0.1, lr_in_buffer=True
)


def test_correction_makes_both_buffer_forms_agree() -> None:
    rates, weights, corrected, plain = [0.1, 0.1, 1.0, 1.0], [], [], []
    u = v = x = y = 0.0
    rule, previous = CorrectMomentumConfig(), 0.0
    for lr in rates:
        context = replace(STEP, lr=lr, previous_lr=previous)
        assert rule.momentum(0.9, replace(context, lr_in_buffer=False)) == 0.9
        u = 0.9 * u + 1.0
        x -= lr * u
        v = rule.momentum(0.9, context) * v + lr
        y -= v
        weights.append(x)
        corrected.append(y)
        previous = lr
    assert weights == pytest.approx([-0.1, -0.29, -3.0, -6.439])
    assert corrected == pytest.approx(weights)
    v = x = 0.0
    for lr in rates:
        v = KeepMomentumConfig().momentum(0.9, STEP) * v + lr
        x -= v
        plain.append(x)
    assert plain == pytest.approx([-0.1, -0.29, -1.461, -3.5149])


def test_a_doubled_batch_at_the_same_rate_halves_the_decay() -> None:
    assert HoldNoiseConfig().momentum(0.9, STEP) == pytest.approx(0.95)


@given(st.floats(0, 0.98), st.integers(1, 10_000), st.integers(1, 10_000), st.floats(0, 1000))
def test_noise_is_held_as_far_as_momentum_goes(
    chosen: float, batch: int, base: int, factor: float
) -> None:
    rule = HoldNoiseConfig()
    step = replace(STEP, batch=batch, base_batch=base, lr_factor=factor)
    found = rule.momentum(chosen, step)
    assert 0 <= found <= 0.99
    if 0 < found < 0.99:
        assert factor / (batch * (1 - found)) == pytest.approx(1 / (base * (1 - chosen)))


@pytest.mark.parametrize("kind", variants_of(MomentumRuleConfig))
@pytest.mark.parametrize("in_buffer", [True, False])
def test_at_the_base_batch_and_a_steady_rate_nothing_changes(kind: str, in_buffer: bool) -> None:
    rule = TypeAdapter(AnyMomentumRule).validate_python({"kind": kind})
    still = replace(STEP, batch=64, lr_in_buffer=in_buffer)
    for chosen in (0.0, 0.9, 0.997):
        assert rule.momentum(chosen, still) == pytest.approx(chosen)
        first = replace(still, previous_lr=0.0)
        assert rule.momentum(chosen, first) == pytest.approx(chosen)
