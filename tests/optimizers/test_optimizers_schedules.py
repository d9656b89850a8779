"""Schedules: the sheets' numbers, bounds that hold for all, and the same rates on resume."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from adaptive_platform.optimizers import AnySchedule, ScheduleConfig
from adaptive_platform.optimizers.cyclic_tail import CyclicTailSchedule
from adaptive_platform.optimizers.decay_schedules import (
    ConstantSchedule,
    CosineSchedule,
    PolynomialSchedule,
    SpNgdSchedule,
)
from adaptive_platform.optimizers.step_schedules import SlowStartSchedule, StepSchedule
from adaptive_platform.progress import Duration, Progress, Unit
from adaptive_platform.settings import variants_of

KINDS = variants_of(ScheduleConfig)
every_schedule = pytest.mark.parametrize("kind", KINDS)


def epochs(*values: float) -> tuple[Duration, ...]:
    return tuple(Duration(value) for value in values)


@every_schedule
@given(st.floats(0, 200), st.floats(0, 100), st.floats(0, 120), st.floats(0.001, 1))
def test_factors_stay_between_0_and_1_and_do_not_move_beyond_the_horizon(
    kind: str, elapsed: float, horizon: float, warmup: float, start: float
) -> None:
    for ramp in ("linear", "exponential", "constant"):
        schedule = KINDS[kind].model_validate(
            {"warmup": Duration(warmup), "warmup_start": start, "warmup_kind": ramp}
        )
        factor = schedule.factor(elapsed, horizon)
        assert 0.0 <= factor <= 1.0
        assert schedule.factor(elapsed, horizon) == factor
        if elapsed >= horizon:
            assert factor == schedule.factor(horizon, horizon)
        assert factor <= schedule.curve(min(elapsed, horizon), horizon)


@every_schedule
def test_a_resumed_run_gets_the_same_list_of_factors(kind: str) -> None:
    schedule = KINDS[kind].model_validate({"warmup": "1 epochs"})

    def factors(start: Progress, stop: float) -> tuple[list[float], Progress]:
        seen, progress = [], start
        while progress.epochs < stop:
            seen.append(schedule.factor(progress.elapsed(Unit.EPOCHS), 5.0))
            batch = min(7, progress.dataset_size - progress.cursor)
            progress = progress.committed(batch, batch, 1.0)
        return seen, progress

    whole, _ = factors(Progress(dataset_size=50), 5.0)
    for stop in (1.0, 2.0, 3.0, 2.3):
        before, progress = factors(Progress(dataset_size=50), stop)
        resumed = TypeAdapter(AnySchedule).validate_python(schedule.model_dump())
        assert resumed == schedule
        after, _ = factors(Progress(**progress.state_dict()), 5.0)
        assert before + after == whole


@every_schedule
def test_a_warmup_in_another_unit_is_refused(kind: str) -> None:
    schedule = KINDS[kind].model_validate({"warmup": "100 steps"})
    schedule.check(Duration(1000.0, Unit.STEPS))
    with pytest.raises(ValueError, match=r"warmup = 100 steps.*5 epochs.*write it in epochs"):
        schedule.check(Duration(5.0))
    KINDS[kind]().check(Duration(1000.0, Unit.STEPS))


def test_linear_warmup_climbs_by_the_step() -> None:
    # Goyal: from 0.1 to 3.2 over 5 epochs of 157 steps, 0.00395 a step
    schedule = ConstantSchedule(warmup=Duration(5.0), warmup_start=0.1 / 3.2)
    rates = [3.2 * schedule.factor(step / 157, 90.0) for step in range(5 * 157 + 2)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[1] - rates[0] == pytest.approx(0.00395, abs=5e-6)
    assert rates[784] < 3.2
    assert rates[785] == pytest.approx(3.2)
    assert rates[786] == pytest.approx(3.2)


def test_exponential_and_constant_warmup() -> None:
    climbing = ConstantSchedule(warmup=Duration(4.0), warmup_start=0.01, warmup_kind="exponential")
    assert [climbing.factor(e, 9.0) for e in (0, 2, 4)] == pytest.approx([0.01, 0.1, 1.0])
    flat = ConstantSchedule(warmup=Duration(4.0), warmup_start=0.25, warmup_kind="constant")
    assert [flat.factor(e, 9.0) for e in (0, 3.99, 4)] == [0.25, 0.25, 1.0]


@pytest.mark.parametrize("ramp", ["exponential", "constant"])
def test_a_warmup_that_would_stay_at_zero_is_refused(ramp: str) -> None:
    with pytest.raises(ValidationError, match="needs warmup_start > 0"):
        ConstantSchedule.model_validate({"warmup": "1 epochs", "warmup_kind": ramp})


def test_polynomial_of_the_tpu_runs() -> None:
    schedule = PolynomialSchedule(warmup=Duration(18.0))
    assert schedule.factor(0, 90) == 0.0
    assert schedule.factor(18, 90) == 1.0
    assert schedule.factor(18 + 36, 90) == pytest.approx(0.25)
    assert schedule.factor(90, 90) == 0.0


def test_polynomial_with_an_end() -> None:
    schedule = PolynomialSchedule(power=2.2, end=0.0025)
    assert [schedule.factor(t, 780) for t in (0, 390, 780)] == pytest.approx(
        [1.0, 0.2196, 0.0025], abs=5e-5
    )


def test_cosine() -> None:
    schedule = CosineSchedule(warmup=Duration(10.0), end=0.1)
    assert [schedule.factor(t, 110.0) for t in (10, 60, 110)] == pytest.approx([1.0, 0.55, 0.1])
    assert schedule.factor(35, 110) == pytest.approx(0.1 + 0.45 * (1 + math.sqrt(0.5)))


def test_sp_ngd_row_of_batch_32k() -> None:
    schedule = SpNgdSchedule()
    rates = [0.03 * schedule.factor(e, 45.0) for e in (0, 1.5, 10, 25.5, 45)]
    assert rates == pytest.approx([0.03, 0.03, 0.0151659, 0.00265165, 7.5687e-6], rel=1e-4)


def test_step_drops_at_milestones_to_the_sample() -> None:
    by_epoch = StepSchedule(milestones=epochs(2, 4))
    by_share = StepSchedule(fractions=(2 / 5, 4 / 5))
    for schedule in (by_epoch, by_share):
        factors = [schedule.factor(samples / 50, 5.0) for samples in (99, 100, 199, 200, 250)]
        assert factors == pytest.approx([1.0, 0.1, 0.1, 0.01, 0.01])


@given(st.integers(1, 10**7), st.sampled_from([1 / 3, 2 / 3, 8 / 9]))
def test_rounding_never_delays_a_drop(third_of_steps: int, share: float) -> None:
    horizon = 9 * third_of_steps
    at = round(horizon * share)
    schedule = StepSchedule(fractions=(share,))
    assert schedule.factor(at, horizon) == 0.1
    assert schedule.factor(at - 1, horizon) == 1.0
    assert 0.07 * 100 > 7  # by rounding
    assert StepSchedule(fractions=(0.07,)).factor(7.0, 100.0) == 0.1


def test_step_defaults_to_goyals_milestones() -> None:
    factors = [StepSchedule().factor(e, 90.0) for e in (29.9, 30, 60, 80)]
    assert factors == pytest.approx([1.0, 0.1, 0.01, 0.001])


def test_milestones_or_fractions_but_not_both_and_in_one_unit() -> None:
    with pytest.raises(ValidationError, match="not both"):
        StepSchedule(milestones=epochs(2), fractions=(0.5,))
    with pytest.raises(ValueError, match="milestones = 2 epochs"):
        StepSchedule(milestones=epochs(2)).check(Duration(100.0, Unit.STEPS))


def test_slow_start_table() -> None:
    schedule = SlowStartSchedule()
    rates = [12.8 * schedule.factor(e, 90.0) for e in (0, 39.9, 40, 70, 85, 90)]
    assert rates == pytest.approx([6.4, 6.4, 0.96, 0.128, 0.0128, 0.0128])


@pytest.mark.parametrize(
    ("fractions", "word"), [((0.5,), "3 fractions"), ((0.5, 0.4, 0.6), "rise")]
)
def test_slow_start_refuses_a_table_that_does_not_fit(
    fractions: tuple[float, ...], word: str
) -> None:
    with pytest.raises(ValidationError, match=word):
        SlowStartSchedule(fractions=fractions)


def test_sp_ngd_refuses_an_end_before_its_start() -> None:
    with pytest.raises(ValidationError, match="must lie after start_fraction"):
        SpNgdSchedule(start_fraction=0.5, end_fraction=0.4)


@given(st.integers(1, 12), st.floats(0.05, 0.95), st.floats(1.0, 500.0), st.floats(0.1, 1.0))
def test_cycles_start_high_and_end_at_zero(
    cycles: int, start: float, horizon: float, restart: float
) -> None:
    schedule = CyclicTailSchedule(cycles=cycles, tail_start=start, restart=restart)
    ends = schedule.cycle_ends(horizon)
    assert len(ends) == cycles
    assert ends[-1] == horizon
    peak = restart * (1 - start) ** 2
    for begin, end in zip([start * horizon, *ends[:-1]], ends, strict=True):
        assert schedule.factor(begin, horizon) == pytest.approx(peak)
        assert schedule.factor((begin + end) / 2, horizon) == pytest.approx(peak / 4)
        assert schedule.factor(end - 1e-6 * (end - begin), horizon) < 1e-6
    assert schedule.factor(horizon, horizon) == 0.0


def test_before_the_tail_the_curve_aims_at_the_horizon() -> None:
    assert CyclicTailSchedule().factor(30.0, 120.0) == PolynomialSchedule().factor(30.0, 120.0)
