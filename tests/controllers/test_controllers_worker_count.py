"""No more workers than keep the efficiency above a floor, by the fitted speed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptive_platform.controllers import Limits
from adaptive_platform.controllers.worker_count import advise_workers
from adaptive_platform.summary import ThroughputModel

FREE = ThroughputModel(
    alpha_grad=0.0,
    beta_grad=0.01,
    alpha_local=0.0,
    beta_local=0.0,
    alpha_node=0.0,
    beta_node=0.0,
    gamma=1.0,
)
SLOW_LINK = replace(FREE, alpha_node=0.64, alpha_local=0.0)


def advise(model: ThroughputModel, *, batch=64, today=4, nodes=2, workers=(1, 8), floor=0.5):
    limits = Limits(dataset_size=10_000, world_size=today, num_nodes=nodes)
    return advise_workers(model, limits, global_batch=batch, workers=workers, min_efficiency=floor)


def test_without_cost_of_reduction_as_many_as_allowed():
    found = advise(FREE)
    assert found.workers == 8
    assert found.efficiency[8] == pytest.approx(1.0)


def test_a_slow_network_keeps_the_run_on_one_node():
    """64 samples take 0.64 s alone; over two nodes a reduction takes as long again."""
    found = advise(SLOW_LINK)
    # 2 workers share a node: 0.32 s. 3 need two nodes: 0.22 + 0.64 s, less than half as efficient.
    assert found.workers == 2
    assert found.efficiency[3] == pytest.approx(0.64 / (3 * (0.22 + 0.64)))
    assert "with 3 it would be 25%" in found.reason


def test_a_larger_batch_is_worth_more_workers():
    assert advise(SLOW_LINK, batch=64).workers < advise(SLOW_LINK, batch=2048).workers == 8


def test_never_beyond_twice_what_was_timed_nor_the_batch():
    assert advise(FREE, today=1, nodes=1).workers == 2
    assert advise(FREE, batch=3).workers == 3


@given(st.integers(1, 6), st.integers(0, 6), st.integers(1, 12), st.floats(0, 1), st.floats(0, 2))
def test_within_bounds_and_above_the_floor_where_any_is(low, more, today, floor, link):
    model = replace(FREE, alpha_local=link, beta_local=0.01)
    found = advise(model, today=today, nodes=1, workers=(low, low + more), floor=floor)
    assert low <= found.workers <= low + more
    assert found.workers == low or found.efficiency[found.workers] >= floor
