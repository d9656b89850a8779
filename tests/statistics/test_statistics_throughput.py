from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from adaptive_platform.statistics.throughput import StepTiming, ThroughputEstimator
from adaptive_platform.summary import GradientSummary, ThroughputModel

TRUE = ThroughputModel(
    alpha_grad=0.05,
    beta_grad=0.001,
    alpha_local=0.02,
    beta_local=0.005,
    alpha_node=0.06,
    beta_node=0.01,
    gamma=2.0,
)


def timing(
    workers: int, nodes: int, micro: int, accumulation: int, noise: float = 1.0
) -> StepTiming:
    return StepTiming(
        world_size=workers,
        num_nodes=nodes,
        microbatch=micro,
        accumulation=accumulation,
        step_seconds=noise * TRUE.step_seconds(workers, nodes, micro, accumulation),
        gradient_seconds=noise * (TRUE.alpha_grad + TRUE.beta_grad * micro),
    )


def fitted(timings: list[StepTiming]) -> ThroughputModel:
    estimator = ThroughputEstimator()
    for seen in timings:
        estimator.update(seen)
    model = estimator.fit()
    assert model is not None
    return model


def test_worked_example_of_pollux() -> None:
    summary = GradientSummary(noise_trace=1000.0, signal_sqnorm=1.0, observations=1)
    assert summary.efficiency(400, 100) == pytest.approx(0.785714, abs=1e-6)
    for workers, accumulation, seconds, goodput in [
        (1, 1, 0.15, 666.667),
        (4, 1, 0.152971, 2054.55),
        (4, 2, 0.302971, 1613.65),
    ]:
        found = TRUE.step_seconds(workers, 1, 100, accumulation)
        batch = workers * 100 * accumulation
        assert found == pytest.approx(seconds, abs=1e-6)
        efficiency = summary.efficiency(batch, 100)
        assert batch / found * efficiency == pytest.approx(goodput, rel=1e-5)


def test_gamma_goes_from_the_sum_to_the_maximum() -> None:
    assert replace(TRUE, gamma=1.0).step_seconds(4, 1, 100, 1) == pytest.approx(0.18)
    assert replace(TRUE, gamma=10.0).step_seconds(4, 1, 100, 1) == pytest.approx(0.15, rel=1e-3)


def test_a_fit_predicts_splits_that_it_has_not_seen() -> None:
    rng = np.random.default_rng(0)
    splits = [(1, 1), (2, 1), (4, 1), (4, 2), (8, 2), (6, 3)]
    seen = [
        timing(workers, nodes, micro, accumulation, float(np.exp(0.02 * rng.standard_normal())))
        for workers, nodes in splits
        for micro in (16, 64, 256)
        for accumulation in (1, 2)
    ]
    model = fitted(seen)
    assert model.fit_error < 0.05
    for workers, nodes, micro, accumulation in [(3, 1, 100, 1), (8, 4, 128, 3), (1, 1, 512, 1)]:
        true = TRUE.step_seconds(workers, nodes, micro, accumulation)
        assert model.step_seconds(workers, nodes, micro, accumulation) == pytest.approx(
            true, rel=0.1
        )


def test_the_fit_error_shows_that_no_model_fits() -> None:
    odd = [replace(timing(1, 1, 2**n, 1), step_seconds=1.0 + 3.0 * (n % 2)) for n in range(1, 9)]
    assert fitted([replace(t, gradient_seconds=None) for t in odd]).fit_error > 0.3


def test_what_was_never_seen_is_pinned() -> None:
    one = fitted([timing(1, 1, 100, 1)])
    assert one.alpha_grad == pytest.approx(0.075, rel=1e-3)
    assert one.step_seconds(1, 1, 100, 1) == pytest.approx(0.15, rel=0.02)
    assert one.alpha_local < 1e-6
    assert one.beta_local == 0
    two = fitted([timing(2, 1, micro, 1) for micro in (50, 100, 200)])
    assert two.beta_local == 0
    assert two.alpha_node >= 1.1 * two.alpha_local


def test_units_do_not_matter() -> None:
    seen = [timing(w, 1, m, 1) for w in (1, 2, 4) for m in (32, 128)]
    slow = [
        replace(
            t, step_seconds=1000 * t.step_seconds, gradient_seconds=1000 * (t.gradient_seconds or 0)
        )
        for t in seen
    ]
    fast_model, slow_model = fitted(seen), fitted(slow)
    for micro in (16, 512):
        ratio = slow_model.step_seconds(3, 1, micro, 2) / fast_model.step_seconds(3, 1, micro, 2)
        assert ratio == pytest.approx(1000, rel=1e-2)


def test_broken_times_are_left_out() -> None:
    estimator = ThroughputEstimator()
    for seconds in (math.nan, math.inf, 0.0, -1.0):
        estimator.update(replace(timing(1, 1, 8, 1), step_seconds=seconds))
    assert estimator.fit() is None
    estimator.update(replace(timing(1, 1, 8, 1), gradient_seconds=math.nan))
    assert estimator.timings()[0].gradient_seconds is None


def test_equal_splits_are_averaged_and_state_round_trips() -> None:
    estimator = ThroughputEstimator()
    for factor in (0.5, 2.0):
        estimator.update(timing(2, 1, 8, 1, factor))
    (mean,) = estimator.timings()
    assert mean.step_seconds == pytest.approx(TRUE.step_seconds(2, 1, 8, 1))
    restored = ThroughputEstimator()
    restored.load_state_dict(json.loads(json.dumps(estimator.state_dict())))
    assert restored.timings() == estimator.timings()
    assert restored.fit() == estimator.fit()
