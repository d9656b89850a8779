from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptive_platform.controllers import Limits, Observation
from adaptive_platform.controllers.controller import settle
from adaptive_platform.controllers.fixed import FixedConfig
from adaptive_platform.progress import Progress
from adaptive_platform.summary import GradientSummary


def observed(batch: int, limits: Limits) -> Observation:
    progress = Progress(dataset_size=limits.dataset_size)
    return Observation(
        progress=progress, summary=GradientSummary(), global_batch=batch, limits=limits
    )


@pytest.mark.parametrize(
    ("limits", "wanted", "batch", "stopped"),
    [
        (Limits(dataset_size=20, world_size=2, max_batch=128), 64, 20, "data size of 20"),
        (Limits(dataset_size=100, max_batch=16), 64, 16, "upper limit of 16"),
        (Limits(dataset_size=100, min_batch=16), 4, 16, "lower limit of 16"),
        (Limits(dataset_size=100, world_size=3, smallest_microbatch=2), 4, 6, "3 workers need"),
        (Limits(dataset_size=2, world_size=3), 1, 2, "3 workers need"),
        (Limits(dataset_size=100), 64, 64, ""),
        (Limits(dataset_size=100), math.inf, 100, "data size"),
    ],
)
def test_clamp_says_what_stopped_it(
    limits: Limits, wanted: float, batch: int, stopped: str
) -> None:
    found, why = limits.clamp(wanted)
    assert found == batch
    assert (stopped in why) if stopped else why == ""


def test_user_bounds_above_the_data_give_way() -> None:
    limits = Limits(dataset_size=20, min_batch=64, max_batch=128)
    assert (limits.lower, limits.upper) == (20, 20)


@pytest.mark.parametrize(
    ("wanted", "batch"),
    [(40, 32), (50, 48), (57, 64), (5, 16), (100, 96), (math.inf, 96), (0.2, 16)],
)
def test_multiples_are_kept_where_there_is_room(wanted: float, batch: int) -> None:
    assert Limits(dataset_size=100, min_batch=10).clamp(wanted, 16)[0] == batch


def test_without_room_for_a_multiple_the_limits_win() -> None:
    assert Limits(dataset_size=100, min_batch=10, max_batch=12).clamp(11, 16)[0] == 11


@given(
    st.integers(1, 100),
    st.integers(1, 100),
    st.floats(0, 300),
    st.integers(1, 20),
    st.integers(1, 200),
)
def test_clamp_never_leaves_the_limits(
    low: int, span: int, wanted: float, multiple_of: int, size: int
) -> None:
    limits = Limits(dataset_size=size, min_batch=low, max_batch=low + span - 1)
    batch, _ = limits.clamp(wanted, multiple_of)
    assert limits.allows(batch)
    inside = [b for b in range(limits.lower, limits.upper + 1) if b % multiple_of == 0]
    if inside:
        assert batch % multiple_of == 0
        assert abs(batch - wanted) <= min(abs(b - wanted) for b in inside) + 1e-9


def test_narrowed_limits_hold_both_bounds() -> None:
    limits = Limits(dataset_size=1000, world_size=2, min_batch=8, max_batch=100)
    both = limits.narrowed(16, 200)
    assert (both.lower, both.upper, both.world_size) == (16, 100, 2)
    assert limits.narrowed(None, None) == limits


def test_settle_explains_a_change_and_a_stay() -> None:
    limits = Limits(dataset_size=20)
    change = settle(observed(8, limits), 64, "noise")
    assert change.changed
    assert change.reason == "noise; the data size of 20 caps the batch"
    stay = settle(observed(8, limits), 8, "noise")
    assert not stay.changed
    assert stay.reason == "noise"


def test_a_start_that_cannot_be_had_says_so() -> None:
    asked = FixedConfig(global_batch=64)
    start = asked.start(Limits(dataset_size=20))
    assert (start.global_batch, start.changed) == (20, True)
    assert start.reason == "batch starts at 20, not 64: the data size of 20 caps the batch"
    had = asked.start(Limits(dataset_size=100))
    assert (had.global_batch, had.changed) == (64, False)


def test_fixed_returns_to_its_batch_when_the_limits_allow() -> None:
    controller = FixedConfig(global_batch=8).build()
    tight, wide = Limits(dataset_size=100, world_size=9), Limits(dataset_size=100)
    assert controller.decide(observed(8, tight)).global_batch == 9
    assert controller.decide(observed(9, wide)).global_batch == 8
    assert not controller.decide(observed(8, wide)).considered
    assert not controller.decide(observed(9, tight)).considered
