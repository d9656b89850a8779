from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptive_platform.summary import GradientSummary

size = st.integers(1, 10**6)
anything = st.floats(-1e300, 1e300).filter(lambda value: value == 0 or abs(value) > 1e-290)
"""Dividing by a batch must not leave the normal numbers, where ratios lose their digits."""


@given(anything, anything, size, size)
def test_every_reading_is_finite(noise: float, signal: float, batch: int, base: int) -> None:
    summary = GradientSummary(noise_trace=noise, signal_sqnorm=signal, observations=1)
    assert summary.noise_scale is None or math.isfinite(summary.noise_scale)
    low, high = sorted((1.0, batch / base))
    assert low * (1 - 1e-9) <= summary.gain(batch, base) <= high * (1 + 1e-9)


@given(st.floats(1e-6, 1e6), st.floats(1e-6, 1e6), size, size)
def test_readings_are_ratios_so_the_loss_scale_cancels(
    noise: float, signal: float, batch: int, base: int
) -> None:
    one = GradientSummary(noise_trace=noise, signal_sqnorm=signal, observations=1)
    scaled = GradientSummary(noise_trace=256 * noise, signal_sqnorm=256 * signal, observations=1)
    assert scaled.noise_scale == one.noise_scale
    assert scaled.gain(batch, base) == pytest.approx(one.gain(batch, base))
    assert one.noise_scale is not None
    expected = (one.noise_scale + base) / (one.noise_scale + batch)
    assert one.efficiency(batch, base) == pytest.approx(expected)


@pytest.mark.parametrize(("batch", "steps"), [(250, 5000), (1000, 2000), (4000, 1250)])
def test_gains_are_the_steps_of_the_published_trade_off(batch: int, steps: int) -> None:
    """McCandlish et al.: S_min 1000, E_min 1e6, so B_crit 1000; S = S_min (1 + B_crit / B)."""
    summary = GradientSummary(noise_trace=1000.0, signal_sqnorm=1.0, observations=1)
    assert summary.gain(batch, 250) == pytest.approx(5000 / steps)
    assert (steps / 1000 - 1) * (steps * batch / 1e6 - 1) == pytest.approx(1)
    assert summary.efficiency(batch, 250) == pytest.approx(5000 * 250 / (steps * batch))
