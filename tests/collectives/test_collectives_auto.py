"""The choice of a plan by size, and links fitted to timings."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import with_reducers

from adaptive_platform.collectives import (
    AutoConfig,
    Reducer,
    RingConfig,
    Timing,
    TorusConfig,
    cost,
    fit_link,
    time_reductions,
)
from adaptive_platform.collectives.cost import Link, Links


def links_of(latency: float, bandwidth: float) -> Links:
    return Links(remote=Link(latency_seconds=latency, bytes_per_second=bandwidth))


@settings(max_examples=30, deadline=None)
@given(
    world_size=st.integers(1, 24),
    latency=st.floats(1e-6, 1e-2),
    bandwidth=st.floats(1e6, 1e11),
)
def test_never_dearer_than_a_candidate(world_size: int, latency: float, bandwidth: float) -> None:
    config = AutoConfig(links=links_of(latency, bandwidth))
    table = config.plans(world_size)
    limits = [limit for limit, _ in table]
    assert limits == sorted(set(limits))
    assert limits[-1] == math.inf
    names = [plan.name for _, plan in table]
    assert all(left != right for left, right in pairwise(names))
    for size in (2.0**12, 2.0**20, 2.0**28):
        chosen = next(plan for limit, plan in table if size <= limit)
        for other in (TorusConfig(), RingConfig()):
            assert cost(chosen, size, config.links) <= cost(
                other.plan(world_size), size, config.links
            ) * (1 + 1e-9)


def test_few_rounds_for_small_messages_and_few_bytes_for_large_ones() -> None:
    config = AutoConfig(links=links_of(1e-3, 1e9), candidates=("ring", "tree"))
    assert [plan.name for _, plan in config.plans(16)] == ["tree", "ring"]
    assert config.plan(16).name == "ring"


def test_the_torus_is_the_default_on_more_than_one_machine() -> None:
    for nodes in (["a"] * 4 + ["b"] * 4, list("abcd"), list("aab")):
        ((limit, plan),) = AutoConfig().plans(len(nodes), nodes)
        assert (limit, plan.name) == (math.inf, "torus")
    assert AutoConfig().plan(8, ["a"] * 4 + ["b"] * 4).grid == (2, 4)
    assert AutoConfig().plan(8, ["a"] * 8).name == "ring"
    assert AutoConfig().plan(8).name == "ring"


def test_on_measured_links_machines_make_the_torus_the_choice_for_large_messages() -> None:
    ethernet = Links(
        remote=Link(latency_seconds=50e-6, bytes_per_second=1.25e9),
        local=Link(latency_seconds=20e-6, bytes_per_second=5e9),
    )
    assert AutoConfig(links=ethernet).plan(8, ["a"] * 4 + ["b"] * 4).name == "torus"


def test_what_was_chosen_is_said_in_one_line() -> None:
    config = AutoConfig(
        links=links_of(1e-3, 1e9),
        candidates=("ring", "tree"),
        wire_dtype="bfloat16",
        timeout_seconds=20,
    )
    first, *others = with_reducers(config, 6, Reducer.describe)
    assert others == [first] * 5
    assert first.startswith("up to ")
    assert "KiB tree over 6 workers" in first
    assert "; above ring over 6 workers" in first
    assert first.endswith("; as bfloat16 between workers")


def test_fit_finds_the_links_that_made_the_timings() -> None:
    truth = Link(latency_seconds=2e-4, bytes_per_second=3e8)
    plans = [RingConfig().plan(6), TorusConfig().plan(6)]
    timings = [
        Timing(plan, size, cost(plan, size, Links(remote=truth)))
        for plan in plans
        for size in (1000, 10**5, 10**7)
    ]
    found = fit_link(timings)
    assert found.latency_seconds == pytest.approx(truth.latency_seconds)
    assert found.bytes_per_second == pytest.approx(truth.bytes_per_second)


def test_fit_keeps_latency_from_going_negative() -> None:
    plan = RingConfig().plan(4)
    timings = [Timing(plan, 1000, 1e-6), Timing(plan, 10**6, 2e-3), Timing(plan, 10**7, 3e-2)]
    assert fit_link(timings).latency_seconds == 0.0
    with pytest.raises(ValueError, match="two message sizes"):
        fit_link(timings[:1])
    with pytest.raises(ValueError, match="did not take longer"):
        fit_link([Timing(plan, 1000, 1e-3), Timing(plan, 10**6, 0.5e-3)])


def test_workers_time_their_reductions_together() -> None:
    def body(reducer: Reducer) -> list[Timing]:
        return time_reductions(reducer, [400, 40_000], repeats=3, warmup=1)

    found = with_reducers(TorusConfig(timeout_seconds=20), 4, body)
    assert all(each == found[0] for each in found)
    assert [timing.message_bytes for timing in found[0]] == [400, 40_000]
    assert all(timing.seconds > 0 and timing.plan.name == "torus" for timing in found[0])
