"""Step and message counts of the plans as their papers give them."""

from __future__ import annotations

import math

import pytest
import torch

from adaptive_platform.collectives import (
    HalvingDoublingConfig,
    HierarchicalConfig,
    HybridConfig,
    ParameterServerConfig,
    Plan,
    RingConfig,
    TorusConfig,
    TreeConfig,
    cost,
    simulate,
)
from adaptive_platform.collectives.cost import Link, Links


def rounds(plan: Plan) -> int:
    """Latencies paid one after the other."""
    return round(cost(plan, 1.0, Links(remote=Link(latency_seconds=1, bytes_per_second=1e300))))


@pytest.mark.parametrize(
    ("grid", "torus", "ring"),
    [
        ((32, 32), 124, 2046),
        ((34, 32), 128, 2174),
        ((32, 64), 188, 4094),
        ((34, 64), 192, 4350),
        ((48, 72), 236, 6910),
        ((64, 64), 252, 8190),
    ],
)
def test_torus_steps(grid: tuple[int, int], torus: int, ring: int) -> None:
    world_size = grid[0] * grid[1]
    assert rounds(TorusConfig(grid=grid).plan(world_size)) == torus
    assert rounds(RingConfig().plan(world_size)) == ring


def test_hierarchical_steps() -> None:
    assert rounds(HierarchicalConfig(group_size=16).plan(1024)) == 186


@pytest.mark.parametrize("workers", range(1, 18))
def test_tree_depth_and_messages(workers: int) -> None:
    plan = TreeConfig().plan(workers)
    vectors = [torch.full((5,), rank) for rank in range(workers)]
    done = simulate(plan, vectors)
    assert done.rounds == 2 * math.ceil(math.log2(workers))
    assert sum(done.elements_sent) == 5 * 2 * (workers - 1)


def test_parameter_server_uses_one_link_for_all() -> None:
    done = simulate(ParameterServerConfig().plan(9), [torch.ones(4)] * 9)
    assert done.rounds == 2 * 8
    assert done.elements_sent == (4 * 8, *([4] * 8))


@pytest.mark.parametrize(("workers", "expected"), [(16, 8), (8, 6), (11, 8)])
def test_halving_doubling_rounds(workers: int, expected: int) -> None:
    done = simulate(HalvingDoublingConfig().plan(workers), [torch.ones(16)] * workers)
    assert done.rounds == expected
    if workers == 16:
        assert set(done.elements_sent) == {2 * 16 * 15 // 16}


def test_hierarchical_groups_are_the_machines_even_if_unequal() -> None:
    plan = HierarchicalConfig().plan(6, ["a", "b", "a", "c", "a", "b"])
    assert plan.phases[0].groups == ((0, 2, 4), (1, 5))
    assert plan.phases[1].groups == ((0, 1, 3),)


def test_hybrid_changes_plan_at_the_threshold() -> None:
    table = HybridConfig(small="tree", large="torus", threshold_kib=1).plans(4)
    assert [(limit, plan.name) for limit, plan in table] == [(1024, "tree"), (math.inf, "torus")]


def test_a_thousand_simulated_workers() -> None:
    """Every message of Mikami's 32 x 32 torus is played: the sum, the steps and the bytes."""
    workers, length = 1024, 2048
    plan = TorusConfig(grid=(32, 32)).plan(workers)
    done = simulate(plan, [torch.full((length,), float(rank)) for rank in range(workers)])
    assert done.rounds == 124
    assert set(done.elements_sent) == {2 * (workers - 1) * length // workers}
    total = torch.full((length,), workers * (workers - 1) / 2)
    assert all(torch.equal(result, total) for result in done.results)
