from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adaptive_platform.statistics import (
    DifferencedMoments,
    NoiseScaleEstimator,
    StatisticsConfig,
    StepMoments,
)
from adaptive_platform.summary import GradientSummary


def moments_of(per_example: torch.Tensor, sizes: list[int]) -> StepMoments:
    """Moments of a step from its per-example gradients, split into micro-batches of `sizes`."""
    micro = [part.mean(0) for part in per_example.split(sizes)]
    return StepMoments(
        micro_sqnorm=float(sum(g.square().sum() for g in micro)) / len(micro),
        inverse_microbatch=sum(1 / b for b in sizes) / len(sizes),
        num_microbatches=len(sizes),
        global_sqnorm=float(per_example.mean(0).square().sum()),
        global_batch=len(per_example),
    )


def estimate(*steps: StepMoments, **config: int) -> GradientSummary:
    estimator = StatisticsConfig(**config).build()
    for step in steps:
        estimator.update(step)
    return estimator.summary()


STEP = StepMoments(
    micro_sqnorm=5.0,
    inverse_microbatch=1 / 32,
    num_microbatches=8,
    global_sqnorm=1.5,
    global_batch=256,
)


def test_worked_example_of_the_noise_scale() -> None:
    summary = estimate(STEP)
    assert summary.noise_trace == pytest.approx(128)
    assert summary.signal_sqnorm == pytest.approx(1)
    assert summary.noise_scale == pytest.approx(128)


def test_four_examples_give_the_sample_variance() -> None:
    summary = estimate(moments_of(torch.tensor([[1.0], [2.0], [3.0], [4.0]]), [1] * 4))
    assert summary.signal_sqnorm == pytest.approx(5.8333, abs=1e-4)
    assert summary.noise_trace == pytest.approx(1.66667, abs=1e-5)
    assert summary.noise_scale == pytest.approx(0.28571, abs=1e-5)


def test_worked_example_of_adascale() -> None:
    gradients = torch.tensor([[1.0, 0.0], [3.0, 0.0], [1.0, 2.0], [3.0, 2.0]])
    summary = estimate(moments_of(gradients, [1] * 4))
    assert summary.noise_trace == pytest.approx(8 / 3)
    assert summary.signal_sqnorm == pytest.approx(13 / 3)
    assert summary.gain(4, 1) == pytest.approx(1.4)


def test_worked_example_that_fairscale_and_adaptdl_agree_on() -> None:
    # Scale 8 over 4 gradients: each is the mean of two base batches, here of one sample.
    gradients = torch.tensor([[1.0, 0.0], [3.0, 0.0], [1.0, 2.0], [3.0, 2.0]])
    summary = estimate(moments_of(gradients.repeat_interleave(2, dim=0), [2] * 4))
    assert summary.noise_trace == pytest.approx(16 / 3)
    assert summary.signal_sqnorm == pytest.approx(13 / 3)
    assert summary.gain(8, 1) == pytest.approx(1.933333, abs=1e-6)


def test_identical_gradients_have_no_noise() -> None:
    summary = estimate(moments_of(torch.ones(8, 3), [2] * 4))
    assert summary.noise_trace == pytest.approx(0, abs=1e-6)
    assert summary.gain(800, 8) == pytest.approx(1)


@pytest.mark.parametrize("sizes", [[4] * 4, [1] * 16, [1, 3, 5, 7]])
def test_recovers_known_noise_and_signal(sizes: list[int]) -> None:
    generator = torch.Generator().manual_seed(5)
    signal = torch.full((50,), 0.2)
    steps = 400
    noise, power = [], []
    for _ in range(steps):
        gradients = signal + 0.7 * torch.randn(16, 50, generator=generator)
        step = moments_of(gradients, sizes)
        noise.append(step.noise_trace)
        power.append(step.signal_sqnorm)
    for seen, true in ((noise, 50 * 0.49), (power, 50 * 0.04)):
        values = torch.tensor(seen)
        assert abs(float(values.mean()) - true) < 4 * float(values.std()) / math.sqrt(steps)


@given(
    st.lists(st.sampled_from([(4, 1), (2, 2), (1, 4), (3, 2)]), min_size=2, max_size=3),
    st.integers(0, 10_000),
)
def test_only_the_microbatches_matter_not_who_ran_them(
    splits: list[tuple[int, int]], seed: int
) -> None:
    per_example = torch.randn(16, 7, generator=torch.Generator().manual_seed(seed))
    micro = [part.mean(0) for part in per_example.split(4)]
    summaries = []
    for workers, _ in splits:
        # Each worker sums its own micro-batches; the sums are then added up.
        shares = [micro[rank::workers] for rank in range(workers)]
        total = sum(sum(float(g.square().sum()) for g in share) for share in shares)
        step = replace(moments_of(per_example, [4] * 4), micro_sqnorm=total / 4)
        summaries.append(estimate(step))
    for summary in summaries[1:]:
        assert summary.noise_trace == pytest.approx(summaries[0].noise_trace, rel=1e-5)
        assert summary.signal_sqnorm == pytest.approx(
            summaries[0].signal_sqnorm, rel=1e-5, abs=1e-5
        )


def test_half_life_counts_samples_not_steps() -> None:
    old = replace(STEP, micro_sqnorm=1.5)
    few = estimate(*[old] * 100, *[replace(STEP, global_batch=256)] * 4, half_life_samples=1024)
    many_steps = [replace(STEP, global_batch=64, inverse_microbatch=1 / 32 - 1 / 256 + 1 / 64)] * 16
    many = estimate(*[old] * 100, *many_steps, half_life_samples=1024)
    assert few.noise_trace == pytest.approx(64, rel=1e-6)  # half of 128 after one half-life
    assert many.noise_trace == pytest.approx(few.noise_trace, rel=1e-9)


def test_the_first_average_is_the_observation_itself() -> None:
    assert estimate(STEP, half_life_samples=10**9).noise_trace == pytest.approx(128)


def test_default_half_life_is_fifty_first_batches() -> None:
    old = replace(STEP, micro_sqnorm=1.5)
    summary = estimate(*[old] * 2000, *[STEP] * 50)
    assert summary.noise_trace == pytest.approx(64, rel=1e-6)


def test_sparser_measurement_forgets_as_fast_in_samples() -> None:
    old = replace(STEP, micro_sqnorm=1.5)
    every_step = estimate(*[old] * 400, *[STEP] * 8, half_life_samples=4096)
    every_fourth = estimate(*[old] * 100, *[STEP] * 2, half_life_samples=4096, every=4)
    assert every_fourth.noise_trace == pytest.approx(every_step.noise_trace, rel=1e-6)
    estimator = StatisticsConfig(every=4).build()
    assert [step for step in range(9) if estimator.due(step)] == [0, 4, 8]


def test_averages_are_smoothed_apart_and_divided_last() -> None:
    weak = replace(STEP, global_sqnorm=0.6)
    summary = estimate(STEP, weak, half_life_samples=10**9)
    noise = (STEP.noise_trace + weak.noise_trace) / 2
    signal = (STEP.signal_sqnorm + weak.signal_sqnorm) / 2
    assert summary.noise_scale == pytest.approx(noise / signal, rel=1e-6)


UNUSABLE = [
    replace(STEP, num_microbatches=1),
    replace(STEP, inverse_microbatch=1 / 256),
    replace(STEP, micro_sqnorm=math.nan),
    replace(STEP, micro_sqnorm=math.inf),
    replace(STEP, global_sqnorm=math.inf),
    replace(STEP, inverse_microbatch=math.inf),
    replace(STEP, micro_sqnorm=1e308, inverse_microbatch=1 / 256 + 1e-12),
    replace(STEP, global_batch=0),
]


@pytest.mark.parametrize("step", UNUSABLE)
def test_unusable_steps_change_nothing(step: StepMoments) -> None:
    estimator = StatisticsConfig().build()
    estimator.update(STEP)
    before = estimator.summary()
    estimator.update(step)
    assert estimator.summary() == before


def test_one_worker_with_one_microbatch_knows_nothing() -> None:
    estimator = StatisticsConfig().build()
    one = StepMoments(
        micro_sqnorm=2.0,
        inverse_microbatch=1 / 8,
        num_microbatches=1,
        global_sqnorm=2.0,
        global_batch=8,
    )
    for _ in range(30):
        estimator.update(one)
    assert estimator.summary() == GradientSummary()
    assert estimator.summary().gain(8, 8) == 1.0


DIFFERENCED = DifferencedMoments(
    difference_sqnorm=2.0, inner_product=2.0, global_batch=1, previous_batch=1
)


def test_worked_example_of_the_differenced_estimator() -> None:
    estimator = StatisticsConfig().build()
    estimator.update_differenced(DIFFERENCED)  # g = (2,0), (1,1)
    summary = estimator.summary()
    assert (summary.noise_trace, summary.signal_sqnorm) == (pytest.approx(1), pytest.approx(2))
    assert summary.biased


def test_differenced_recovers_noise_of_unequal_batches() -> None:
    generator = torch.Generator().manual_seed(1)
    noise = []
    for _ in range(2000):
        first = 0.3 + torch.randn(4, 20, generator=generator)
        second = 0.3 + torch.randn(12, 20, generator=generator)
        one, two = first.mean(0), second.mean(0)
        noise.append(
            DifferencedMoments(
                difference_sqnorm=float((two - one).square().sum()),
                inner_product=float(one @ two),
                global_batch=12,
                previous_batch=4,
            ).noise_trace
        )
    values = torch.tensor(noise)
    assert abs(float(values.mean()) - 20) < 4 * float(values.std()) / math.sqrt(len(noise))


def test_real_estimates_replace_biased_ones_for_good() -> None:
    estimator = StatisticsConfig().build()
    estimator.update_differenced(DIFFERENCED)
    estimator.update(STEP)
    assert estimator.summary() == replace(estimate(STEP, half_life_samples=50))
    estimator.update_differenced(DIFFERENCED)
    assert estimator.summary().noise_trace == pytest.approx(128)


@pytest.mark.parametrize(
    "step",
    [
        replace(DIFFERENCED, difference_sqnorm=math.nan),
        replace(DIFFERENCED, inner_product=math.inf),
        replace(DIFFERENCED, previous_batch=0),
    ],
)
def test_unusable_differences_change_nothing(step: DifferencedMoments) -> None:
    estimator = StatisticsConfig().build()
    estimator.update_differenced(step)
    assert estimator.summary() == GradientSummary()


def test_another_measure_starts_the_averages_anew_and_survives_a_resume() -> None:
    through = replace(STEP, preconditioned=True, micro_sqnorm=500.0, global_sqnorm=150.0)
    estimator = StatisticsConfig().build()
    estimator.update(STEP)
    assert not estimator.summary().preconditioned
    estimator.update(through)
    assert estimator.summary().noise_trace == pytest.approx(12_800)
    assert estimator.summary().observations == 1
    assert estimator.summary().preconditioned
    restored = StatisticsConfig().build()
    restored.load_state_dict(json.loads(json.dumps(estimator.state_dict())))
    for one in (estimator, restored):
        one.update(through)
    assert restored.summary() == estimator.summary()
    assert restored.summary().observations == 2
    restored.update(STEP)
    assert restored.summary() == estimate(STEP)


finite = st.floats(0, 1e30)


@given(st.lists(st.tuples(finite, finite, st.integers(2, 64)), min_size=1, max_size=8))
def test_state_round_trips_exactly(steps: list[tuple[float, float, int]]) -> None:
    def moments(micro: float, whole: float, batch: int) -> StepMoments:
        return StepMoments(
            micro_sqnorm=micro,
            inverse_microbatch=1.0,
            num_microbatches=batch,
            global_sqnorm=whole,
            global_batch=batch,
        )

    def fed(estimator: NoiseScaleEstimator) -> NoiseScaleEstimator:
        for step in steps:
            estimator.update(moments(*step))
        return estimator

    original = fed(StatisticsConfig().build())
    restored = StatisticsConfig().build()
    restored.load_state_dict(json.loads(json.dumps(original.state_dict())))
    assert restored.summary() == original.summary()
    assert fed(restored).state_dict() == fed(original).state_dict()


def test_a_configured_half_life_wins_over_the_saved_one() -> None:
    saved = StatisticsConfig(half_life_samples=10).build()
    saved.update(STEP)
    changed = StatisticsConfig(half_life_samples=1024).build()
    changed.load_state_dict(saved.state_dict())
    assert changed.state_dict()["half_life_samples"] == 1024
