from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from adaptive_platform.controllers.lr_rules import (
    AdaScaleConfig,
    LegwConfig,
    LinearConfig,
    LrRuleConfig,
    NoneConfig,
    SqrtConfig,
)
from adaptive_platform.progress import Progress
from adaptive_platform.summary import GradientSummary

SUMMARY = GradientSummary(noise_trace=8 / 3, signal_sqnorm=13 / 3, observations=1)


def factor(rule: LrRuleConfig, batch: int, base: int, epochs: float = 0.0) -> float:
    progress = Progress(dataset_size=1000, samples=round(1000 * epochs))
    return rule.factor(batch, base, SUMMARY, progress)


def test_factors_at_four_times_the_base_batch() -> None:
    assert factor(NoneConfig(), 4, 1) == 1
    assert factor(LinearConfig(), 4, 1) == 4
    assert factor(SqrtConfig(), 4, 1) == 2
    assert factor(AdaScaleConfig(), 4, 1) == pytest.approx(1.4)
    assert factor(AdaScaleConfig(exponent=0.5), 4, 1) == pytest.approx(1.4**0.5)


def test_adascale_reads_the_schedule_in_scale_invariant_steps_as_published() -> None:
    assert AdaScaleConfig().clock == "scale_invariant"
    assert AdaScaleConfig(clock="samples").clock == "samples"
    assert LinearConfig().clock == "samples"


def test_the_power_of_the_gain_is_the_published_one_of_the_optimizer() -> None:
    """Pollux: 1 for SGD, 1/2 for Adam; a number in the recipe wins."""
    rule = AdaScaleConfig()
    assert factor(rule.chosen(for_betas=False), 4, 1) == pytest.approx(1.4)
    assert factor(rule.chosen(for_betas=True), 4, 1) == pytest.approx(1.4**0.5)
    assert factor(AdaScaleConfig(exponent=1.0).chosen(for_betas=True), 4, 1) == pytest.approx(1.4)
    for other in (NoneConfig(), LinearConfig(), SqrtConfig(), LegwConfig(warmup_epochs=1)):
        assert other.chosen(for_betas=True) == other


def test_a_step_counts_for_its_gain_up_to_the_cap_of_the_rate() -> None:
    assert AdaScaleConfig(exponent=0.5).advance(4.0) == 4.0
    assert AdaScaleConfig(max_factor=1.5).advance(4.0) == 1.5
    capped = AdaScaleConfig(exponent=0.5, max_factor=1.5)
    assert capped.advance(4.0) == pytest.approx(2.25)
    assert capped.advance(2.0) == 2.0


@given(
    st.just(0.0) | st.floats(1e-9, 1e9),
    st.floats(0, 1e9),
    st.integers(1, 1000),
    st.integers(1, 100),
)
def test_adascale_lies_between_one_and_the_linear_rule(
    noise: float, signal: float, base: int, ratio: int
) -> None:
    summary = GradientSummary(noise_trace=noise, signal_sqnorm=signal, observations=1)
    rule, progress = AdaScaleConfig(), Progress(dataset_size=1)
    found = rule.factor(base * ratio, base, summary, progress)
    assert found * (1 + 1e-12) >= 1
    assert found <= ratio * (1 + 1e-9)
    assert found <= rule.factor(base * ratio + 1, base, summary, progress) * (1 + 1e-9)


def test_clipping_happens_on_the_averages() -> None:
    rule, progress = AdaScaleConfig(), Progress(dataset_size=1)
    for noise, signal, gain in [(1.0, -1.0, 4), (0.0, 0.0, 1), (2.0, 1.0, 2), (-1.0, 1.0, 1)]:
        # S of one example; the base batch is one example, the batch four.
        summary = GradientSummary(noise_trace=noise, signal_sqnorm=signal, observations=1)
        assert rule.factor(4, 1, summary, progress) == pytest.approx(gain)


@pytest.mark.parametrize(
    ("batch", "epochs", "expected"),
    [
        (4, 0.0, 2 * 1 / 4),
        (4, 0.5, 2 * 1 / 4),
        (4, 2.0, 2 * 2 / 4),
        (4, 4.0, 2.0),
        (4, 9.0, 2.0),
        (1, 0.3, 1.0),
    ],
)
def test_legw_stretches_the_warm_up(batch: int, epochs: float, expected: float) -> None:
    assert factor(LegwConfig(warmup_epochs=1.0), batch, 1, epochs) == pytest.approx(expected)


@given(st.integers(1, 64), st.integers(1, 64), st.floats(0.01, 20))
def test_legw_times_its_schedule_is_the_published_warm_up(
    batch: int, base: int, epochs: float
) -> None:
    ratio, warmup = batch / base, 1.5
    progress = Progress(dataset_size=10**6, samples=round(10**6 * epochs))
    rule = LegwConfig(warmup_epochs=warmup)
    scheduled = min(1.0, progress.epochs / warmup)
    published = ratio**0.5 * min(1.0, progress.epochs / (ratio * warmup))
    found = rule.factor(batch, base, SUMMARY, progress)
    assert scheduled * found == pytest.approx(published)


@pytest.mark.parametrize("fields", [{"max_factor": 0.5}, {"base_batch": 0}])
def test_senseless_settings_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        LinearConfig(**fields)
