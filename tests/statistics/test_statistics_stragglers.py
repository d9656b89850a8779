"""Slow workers are named soon, once, and not for a single bad step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptive_platform.statistics import Straggler, Stragglers


def feed(watch: Stragglers, paces: list[float], steps: int) -> list[tuple[int, Straggler]]:
    return [(step, found) for step in range(1, steps + 1) for found in watch.observe(paces)]


def test_three_times_slower_is_named_once_within_twenty_steps():
    found = feed(Stragglers(), [1.0, 3.0, 1.1], 200)
    assert [f.rank for _, f in found] == [1]
    assert found[0][0] <= 20
    assert found[0][1].ratio == pytest.approx(3.0 / 1.05)


def test_of_two_workers_the_slow_one_is_named_and_not_the_quick_one():
    assert [f.rank for _, f in feed(Stragglers(), [1.0, 2.5], 50)] == [1]
    assert feed(Stragglers(), [1.0], 50) == []


def test_single_bad_steps_name_nobody_and_idle_workers_do_not_count():
    watch = Stragglers()
    for _ in range(10):
        assert feed(watch, [1.0, 1.0], 4) == []
        assert feed(watch, [1.0, 9.0], 1) == []
    assert feed(Stragglers(), [1.0, 0.0, 1.0], 50) == []


def test_a_worker_that_recovered_is_named_again_and_other_workers_begin_anew():
    watch = Stragglers()
    assert len(feed(watch, [1.0, 3.0], 20)) == 1
    assert feed(watch, [1.0, 1.0], 20) == []
    assert len(feed(watch, [1.0, 3.0], 20)) == 1
    assert [f.rank for _, f in feed(watch, [3.0, 1.0, 1.0], 20)] == [0]


@given(st.lists(st.lists(st.floats(1.0, 1.9), min_size=3, max_size=3), max_size=40))
def test_differences_below_the_factor_name_nobody(rows):
    watch = Stragglers()
    assert all(watch.observe(row) == [] for row in rows)
