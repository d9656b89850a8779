"""The cost model against closed forms of the papers, and against rounds played one by one."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptive_platform.collectives import (
    HierarchicalConfig,
    ParameterServerConfig,
    Plan,
    ReducerConfig,
    RingConfig,
    TorusConfig,
    TreeConfig,
)
from adaptive_platform.collectives.cost import Link, Links, cheapest, cost, exposed_seconds
from adaptive_platform.collectives.schedules import _MAKERS as SCHEDULES
from adaptive_platform.collectives.schedules import chunk_bounds, rounds_of
from adaptive_platform.settings import variants_of

ALPHA, BETA = 3e-5, 1e-9
UNIFORM = Links(remote=Link(latency_seconds=ALPHA, bytes_per_second=1 / BETA))
BYTES = 1e6


@given(rows=st.integers(1, 12), length=st.integers(1, 12))
def test_torus_and_ring_closed_forms(rows: int, length: int) -> None:
    n = rows * length
    volume = 2 * BYTES * (1 - 1 / n) * BETA
    torus = cost(TorusConfig(grid=(rows, length)).plan(n), BYTES, UNIFORM)
    assert torus == pytest.approx(2 * (length - 1 + rows - 1) * ALPHA + volume)
    ring = cost(RingConfig().plan(n), BYTES, UNIFORM)
    assert ring == pytest.approx(2 * (n - 1) * ALPHA + volume)


@pytest.mark.parametrize(("workers", "ratio"), [(2, 2.0), (32, 6.4), (128, 18.29)])
def test_parameter_server_against_tree(workers: int, ratio: float) -> None:
    links = Links(remote=Link(latency_seconds=0, bytes_per_second=1e9))
    server = cost(ParameterServerConfig().plan(workers), BYTES, links)
    tree = cost(TreeConfig().plan(workers), BYTES, links)
    assert tree == pytest.approx(2 * math.log2(workers) * BYTES / 1e9)
    # The paper counts worker 0's own message as well: p instead of p - 1.
    assert server / tree * workers / (workers - 1) == pytest.approx(ratio, abs=0.01)


def test_hierarchical_closed_form() -> None:
    p, k = 64, 8
    expected = (4 * (k - 1) + 2 * (p // k - 1)) * ALPHA
    expected += BYTES * (4 * (k - 1) / k + 2 * (1 - k / p)) * BETA
    plan = HierarchicalConfig(group_size=k).plan(p)
    assert cost(plan, BYTES, UNIFORM) == pytest.approx(expected)


def played(plan: Plan, elements: int, links: Links, nodes: list[str]) -> float:
    """The same cost from the messages of `schedules`, round by round."""
    total = 0.0
    spans = [plan.spans(rank, elements) for rank in range(plan.world_size)]
    for index, phase in enumerate(plan.phases):
        turns: dict[int, list[tuple[int, int, int]]] = {}
        for group in phase.groups:
            bounds = chunk_bounds(
                spans[group[0]][index].start, spans[group[0]][index].stop, len(group)
            )
            for place, rank in enumerate(group):
                for turn, each in enumerate(
                    rounds_of(phase.op, phase.algorithm, len(group), place)
                ):
                    if each.send is not None:
                        size = bounds[each.send.stop] - bounds[each.send.start]
                        turns.setdefault(turn, []).append((rank, group[each.send.peer], size))
        for messages in turns.values():
            remote = [m for m in messages if nodes[m[0]] != nodes[m[1]]]
            local = [m for m in messages if nodes[m[0]] == nodes[m[1]]]
            seconds = []
            for link, found, key in (
                (links.remote, remote, lambda rank: nodes[rank]),
                (links.local, local, lambda rank: rank),
            ):
                loads: dict[tuple[int, object], int] = {}
                for source, target, size in found:
                    for end in ((0, key(source)), (1, key(target))):
                        loads[end] = loads.get(end, 0) + size
                if loads:
                    seconds.append(
                        link.latency_seconds + max(loads.values()) / link.bytes_per_second
                    )
            total += max(seconds)
    return total


@pytest.mark.parametrize("kind", sorted(variants_of(ReducerConfig)))
@settings(max_examples=15, deadline=None)
@given(world_size=st.integers(1, 20), data=st.data())
def test_agrees_with_rounds_played_one_by_one(kind: str, world_size: int, data) -> None:
    nodes = data.draw(st.lists(st.sampled_from("abc"), min_size=world_size, max_size=world_size))
    links = Links(
        remote=Link(latency_seconds=5.0, bytes_per_second=2.0),
        local=Link(latency_seconds=0.5, bytes_per_second=7.0),
    )
    elements = math.lcm(*range(1, 21))  # every chunk of every plan is whole
    for _, plan in variants_of(ReducerConfig)[kind]().plans(world_size, nodes):
        expected = played(plan, elements, links, nodes)
        assert cost(plan, elements, links, nodes) == pytest.approx(expected)


def test_every_schedule_has_a_price() -> None:
    from adaptive_platform.collectives.cost import _MAKERS as PRICES

    assert set(PRICES) == set(SCHEDULES)


def test_rows_on_machines_keep_traffic_off_the_network() -> None:
    """2 machines x 4 workers, 200 Mbit/s cards: the bound is 2 (H - 1) / H * bytes / rate."""
    nodes = ["a"] * 4 + ["b"] * 4
    links = Links(
        remote=Link(latency_seconds=0, bytes_per_second=25e6),
        local=Link(latency_seconds=0, bytes_per_second=1e12),
    )
    bound = 2 * (1 / 2) * 25e6 / 25e6
    torus = cost(TorusConfig().plan(8, nodes), 25e6, links, nodes)
    assert torus == pytest.approx(bound, rel=1e-3)
    assert cost(RingConfig().plan(8, nodes), 25e6, links, nodes) > 1.7 * bound


def test_tens_of_thousands_of_workers() -> None:
    torus = TorusConfig().plan(65_536)
    assert torus.grid == (256, 256)
    expected = 4 * 255 * ALPHA + 2 * BYTES * (1 - 1 / 65_536) * BETA
    assert cost(torus, BYTES, UNIFORM) == pytest.approx(expected)


def test_cheapest_depends_on_the_size() -> None:
    plans = {"ring": RingConfig().plan(16), "tree": TreeConfig().plan(16)}
    assert cheapest(plans, 100, UNIFORM) == "tree"
    assert cheapest(plans, 1e9, UNIFORM) == "ring"


@pytest.mark.parametrize(
    ("backward", "reductions", "bubble"),
    [((3, 2, 1), (1, 1, 1), 1), ((1, 1, 1), (3, 2, 1), 4), ((1, 1), (0, 0), 0)],
)
def test_exposed_time(backward: tuple[int, ...], reductions: tuple[int, ...], bubble: int) -> None:
    ready = [sum(backward[: index + 1]) for index in range(len(backward))]
    assert exposed_seconds(ready, reductions, sum(backward)) == bubble
