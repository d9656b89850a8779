"""The torus: the worked example of the paper's sheet, its step table, and the choice of a grid."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adaptive_platform.collectives import RingConfig, TorusConfig, simulate
from adaptive_platform.collectives.plan import Plan
from adaptive_platform.collectives.schedules import Op
from adaptive_platform.collectives.torus import rows_by_node, square_grid
from adaptive_platform.errors import UserError


def test_two_by_two_example() -> None:
    plan = TorusConfig(grid=(2, 2)).plan(4)
    vectors = [torch.tensor(v) for v in ([1, 2], [3, 4], [5, 6], [7, 8])]
    scattered = Plan("first phase", 4, (2, 2), (plan.phases[0], plan.phases[2]))
    rows = simulate(scattered, vectors).results
    assert [row.tolist() for row in rows] == [[4, 6], [4, 6], [12, 14], [12, 14]]
    done = simulate(plan, vectors)
    assert [result.tolist() for result in done.results] == [[16, 20]] * 4
    assert [span.start for span in (plan.spans(r, 2)[1] for r in range(4))] == [0, 1, 0, 1]


@pytest.mark.parametrize(("grid", "steps"), [((2, 4), 8), ((4, 4), 12), ((1, 6), 10), ((5, 1), 8)])
def test_rounds(grid: tuple[int, int], steps: int) -> None:
    world_size = grid[0] * grid[1]
    vectors = [torch.ones(world_size)] * world_size
    assert simulate(TorusConfig(grid=grid).plan(world_size), vectors).rounds == steps


@given(rows=st.integers(1, 8), length=st.integers(1, 8), scale=st.integers(1, 3))
def test_sends_as_much_as_a_flat_ring(rows: int, length: int, scale: int) -> None:
    world_size = rows * length
    elements = world_size * scale
    torus = TorusConfig(grid=(rows, length)).plan(world_size)
    turned = TorusConfig(grid=(length, rows)).plan(world_size)
    for rank in range(world_size):
        expected = 2 * (world_size - 1) * elements // world_size
        assert torus.elements_sent(rank, elements) == expected
        assert turned.elements_sent(rank, elements) == expected
        assert RingConfig().plan(world_size).elements_sent(rank, elements) == expected


@pytest.mark.parametrize(
    ("world_size", "grid"),
    [(1, (1, 1)), (2, (2, 1)), (4, (2, 2)), (6, (2, 3)), (7, (7, 1)), (12, (3, 4)), (64, (8, 8))],
)
def test_squarest_grid_and_primes(world_size: int, grid: tuple[int, int]) -> None:
    assert square_grid(world_size) == grid
    assert TorusConfig().plan(world_size).grid == grid


def test_prime_is_one_plain_all_reduce() -> None:
    assert [phase.op for phase in TorusConfig().plan(7).phases] == [Op.ALL_REDUCE]


def test_rows_are_the_machines() -> None:
    plan = TorusConfig().plan(6, ["a", "b", "a", "b", "b", "a"])
    assert plan.grid == (2, 3)
    assert plan.phases[0].groups == ((0, 2, 5), (1, 3, 4))
    assert plan.phases[1].groups == ((0, 1), (2, 3), (5, 4))


@pytest.mark.parametrize("nodes", [["a", "a", "b"], ["a", "b", "c"], ["a", "a", "a"]])
def test_unequal_or_single_machines_make_no_rows(nodes: list[str]) -> None:
    assert rows_by_node(nodes) is None


def test_grid_that_does_not_fit_is_refused() -> None:
    with pytest.raises(UserError, match=r"reducer.grid = \[2, 3\]: holds 6 workers.*are 4.*Leave"):
        TorusConfig(grid=(2, 3)).plan(4)
    with pytest.raises(ValueError, match="at least 1"):
        TorusConfig(grid=(0, 3))
