from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from adaptive_platform.controllers import Decision, Limits, Observation
from adaptive_platform.controllers.noise_scale import NoiseScaleConfig
from adaptive_platform.progress import Progress
from adaptive_platform.summary import GradientSummary

BIG = Limits(dataset_size=100_000)


def noisy(scale: float, observations: int = 100) -> GradientSummary:
    return GradientSummary(noise_trace=scale, signal_sqnorm=1.0, observations=observations)


def decide(
    summary: GradientSummary, batch: int = 32, limits: Limits = BIG, **config: Any
) -> Decision:
    """One decision that is due."""
    controller = NoiseScaleConfig(global_batch=batch, **config).build()
    size = limits.dataset_size
    return controller.decide(
        Observation(
            progress=Progress(dataset_size=size, samples=10 * size),
            summary=summary,
            global_batch=batch,
            limits=limits,
        )
    )


def test_follows_the_noise_scale_and_explains_it() -> None:
    decision = decide(noisy(50.4))
    assert decision.global_batch == 50
    assert decision.changed
    assert decision.reason == "noise scale 50.4"
    assert decision.inputs["noise_scale"] == 50.4
    assert [c.global_batch for c in decision.candidates] == [32, 50, 50]
    gain = (50.4 / 32 + 1) / (50.4 / 50 + 1)
    assert decision.inputs["predicted_step_gain"] == pytest.approx(gain)
    assert decision.inputs["predicted_sample_gain"] == pytest.approx(gain * 32 / 50)


def test_scale_factor_multiplies_the_target() -> None:
    assert decide(noisy(100.0), scale_factor=0.5).global_batch == 50


@pytest.mark.parametrize(
    ("scale", "config", "batch"),
    [
        (1e6, {}, 64),
        (1e6, {"max_growth": 1.5}, 48),
        (1.0, {}, 16),
        (1.0, {"max_shrink": 1.0}, 32),
        (1.0, {"max_shrink": 0.9}, 29),
        (36.0, {}, 32),
        (38.0, {}, 38),
        (28.0, {}, 32),
        (27.0, {}, 27),
        (1e6, {"max_growth": 1.5, "multiple_of": 32}, 64),
        (1e6, {"max_growth": 3.2, "multiple_of": 32}, 96),
        (1.0, {"multiple_of": 12}, 24),
        (1e6, {"max_batch": 40}, 40),
        (1.0, {"min_batch": 20}, 20),
        (1e6, {"max_data_share": 0.0004}, 40),
        (1e6, {"max_data_share": 0.0004, "max_batch": 39}, 39),
    ],
)
def test_pace_hysteresis_and_rounding(scale: float, config: dict[str, Any], batch: int) -> None:
    assert decide(noisy(scale), **config).global_batch == batch


def test_small_batches_can_still_grow_by_one() -> None:
    assert decide(noisy(1e6), batch=1, max_growth=1.1).global_batch == 2


@pytest.mark.parametrize("signal", [0.0, -3.0, None])
def test_holds_while_noise_hides_the_signal(signal: float | None) -> None:
    summary = GradientSummary(noise_trace=5.0, signal_sqnorm=signal, observations=100)
    decision = decide(summary)
    assert not decision.changed
    assert decision.considered
    assert "hold" in decision.reason


def test_waits_for_enough_observations() -> None:
    decision = decide(noisy(1e6, observations=9))
    assert not decision.changed
    assert "9 of 10" in decision.reason


def test_small_data_caps_the_batch_and_the_change_says_so() -> None:
    limits = Limits(dataset_size=20, world_size=2, max_batch=128)
    changes = [d for d in drive(lambda _: 1e6, limits, steps=60, start=5) if d.changed]
    assert [d.global_batch for d in changes] == [10, 20]
    assert "data size of 20 caps the batch" in changes[-1].reason


def drive(
    scale_at: Callable[[int], float],
    limits: Limits,
    *,
    steps: int,
    start: int,
    usable: Callable[[int], bool] = lambda step: True,
    **config: Any,
) -> list[Decision]:
    """Decisions of a run whose noise scale at step t is `scale_at(t)`."""
    controller = NoiseScaleConfig(global_batch=start, **config).build()
    batch, progress, decisions = start, Progress(dataset_size=limits.dataset_size), []
    for step in range(steps):
        taken = min(batch, limits.dataset_size - progress.cursor)
        progress = progress.committed(consumed=taken, trained=taken, gain=1.0)
        summary = noisy(scale_at(step)) if usable(step) else GradientSummary(observations=step)
        decision = controller.decide(
            Observation(progress=progress, summary=summary, global_batch=batch, limits=limits)
        )
        batch = decision.global_batch
        decisions.append(decision)
    return decisions


def test_decides_once_per_interval_of_samples() -> None:
    limits = Limits(dataset_size=1000)
    decisions = drive(lambda _: 10.0, limits, steps=100, start=10, decide_every="100 samples")
    assert [n for n, d in enumerate(decisions, start=1) if d.considered] == list(range(10, 101, 10))


@settings(max_examples=50, deadline=None)
@given(
    true=st.integers(2, 3000),
    start=st.integers(1, 3000),
    seed=st.integers(0, 1000),
    broken=st.integers(2, 9),
)
def test_settles_within_a_fifth_of_the_right_batch(
    true: int, start: int, seed: int, broken: int
) -> None:
    rng = random.Random(seed)
    limits = Limits(dataset_size=4000, world_size=2)
    decisions = drive(
        lambda _: true * rng.uniform(0.97, 1.03),
        limits,
        steps=120,
        start=start,
        usable=lambda step: step % broken > 0,
        decide_every="1 samples",
    )
    batches = [d.global_batch for d in decisions]
    assert abs(batches[-1] / true - 1) <= 0.2 or abs(batches[-1] - true) <= 1
    changes = [d.global_batch for d in decisions if d.changed]
    turns = sum(
        (b > a) != (c > b) for a, b, c in zip(changes, changes[1:], changes[2:], strict=False)
    )
    assert turns <= 1


@pytest.mark.parametrize(
    "config",
    [
        {"decide_every": "10 steps"},
        {"decide_every": "0 epochs"},
        {"min_batch": 64},
        {"max_batch": 16},
        {"max_growth": 1.0},
        {"hysteresis": -0.1},
        {"scale_factor": 0.0},
    ],
)
def test_senseless_settings_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        NoiseScaleConfig(global_batch=32, **config)
