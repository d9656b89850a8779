"""Shares by speed: the best are dealt, most of a slow worker's loss comes back, calmly."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptive_platform.controllers.worker_shares import WorkerShares, balanced, slowest

PACES = st.lists(st.floats(0.1, 10.0), min_size=2, max_size=4)


@given(st.lists(st.floats(0.1, 10.0), min_size=2, max_size=3), st.integers(3, 9))
def test_no_other_way_of_dealing_has_a_faster_slowest_worker(paces, parts):
    found = balanced(paces, parts)
    assert sum(found) == parts
    assert min(found) >= 1
    every = itertools.product(range(1, parts + 1), repeat=len(paces))
    best = min(slowest(paces, each) for each in every if sum(each) == parts)
    assert slowest(paces, found) == pytest.approx(best)


def simulate(
    shares: WorkerShares, seconds: list[float], fixed: float, steps: int, noise: float, seed: int
) -> list[float]:
    """Seconds of each step where a pass takes a fixed time and `seconds` per sample of 1,000."""
    draw = random.Random(seed)
    found = []
    for _ in range(steps):
        total = sum(shares.parts)
        times = [
            (fixed + s * 1000.0 * part / total) * (1.0 + noise * draw.random())
            for s, part in zip(seconds, shares.parts, strict=True)
        ]
        found.append(max(times))
        paces = [t / (1000.0 * p / total) for t, p in zip(times, shares.parts, strict=True)]
        shares.observe(paces)
    return found


@given(st.integers(2, 8), st.integers(0, 7), st.floats(0.0, 0.2), st.integers(0, 99))
def test_at_least_half_of_what_a_three_times_slower_worker_costs_comes_back(
    workers, slow, noise, seed
):
    paces = [0.003 if rank == slow % workers else 0.001 for rank in range(workers)]
    shares = WorkerShares()
    shares.begin(workers)
    times = simulate(shares, paces, 0.0, 120, noise, seed)
    undisturbed, disturbed = 1000.0 * 0.001 / workers, 1000.0 * 0.003 / workers
    after = sum(times[60:]) / len(times[60:]) / (1.0 + noise)
    assert after <= disturbed - 0.5 * (disturbed - undisturbed)


@given(PACES, st.floats(0.0, 0.5))
def test_a_fixed_cost_per_pass_never_makes_steps_slower_than_equal_shares(paces, fixed):
    shares = WorkerShares()
    shares.begin(len(paces))
    seconds = [pace / 1000.0 for pace in paces]
    times = simulate(shares, seconds, fixed, 200, 0.0, 0)
    assert times[-1] <= times[0] * (1.0 + 1e-9)


@given(st.integers(2, 6), st.integers(0, 99))
def test_noise_alone_changes_nothing(workers, seed):
    shares = WorkerShares()
    shares.begin(workers)
    simulate(shares, [0.001] * workers, 0.0, 300, 0.2, seed)
    assert shares.parts == (1,) * workers


def test_a_worker_that_recovers_takes_as_much_as_the_others_again():
    shares = WorkerShares()
    shares.begin(3)
    simulate(shares, [0.001, 0.003, 0.001], 0.0, 50, 0.1, 0)
    assert shares.parts[1] < min(shares.parts[0], shares.parts[2]) / 2
    simulate(shares, [0.001] * 3, 0.0, 50, 0.1, 0)
    assert shares.parts == (1, 1, 1)


def test_state_goes_on_with_as_many_workers_and_is_left_with_others():
    shares, other, fewer = WorkerShares(), WorkerShares(), WorkerShares()
    shares.begin(3)
    simulate(shares, [0.001, 0.003, 0.001], 0.0, 20, 0.1, 0)
    other.begin(3)
    other.load_state_dict(shares.state_dict())
    assert other.state_dict() == shares.state_dict()
    fewer.begin(2)
    fewer.load_state_dict(shares.state_dict())
    assert fewer.parts == (1, 1)


def test_one_that_has_no_samples_is_not_judged():
    shares = WorkerShares()
    shares.begin(2)
    for _ in range(50):
        assert not shares.observe([0.001, 0.0])
    alone = WorkerShares()
    assert not alone.observe([0.001])
