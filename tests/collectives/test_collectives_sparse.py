"""Coarse-grained sparse sums against the paper's numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import with_reducers

from adaptive_platform.collectives import Reducer, TorusConfig
from adaptive_platform.collectives.sparse import (
    SparseState,
    choose_chunks,
    sparse_sum,
)
from adaptive_platform.collectives.sparse_config import sparsity

CONFIG = TorusConfig(timeout_seconds=20)


def test_worked_example_of_two_workers() -> None:
    vectors = [torch.tensor([1.0, -1.0, 0.1, 0.2]), torch.tensor([2.0, 0.0, -0.1, 0.3])]

    def body(reducer: Reducer) -> tuple[list[float], list[bool], list[float]]:
        state = SparseState(4, chunk=2)
        total, mask = sparse_sum(state, vectors[reducer.rank], reducer, count=1)
        return (total / 2).tolist(), mask.tolist(), state.residual.tolist()

    found = with_reducers(CONFIG, 2, body)
    for rank, (average, mask, residual) in enumerate(found):
        assert average == [1.5, -0.5, 0.0, 0.0]
        assert mask == [True, True, False, False]
        assert residual == pytest.approx([0.0, 0.0, *vectors[rank][2:].tolist()])


def test_what_was_sent_and_what_waits_is_all_there_was() -> None:
    generator = torch.Generator().manual_seed(3)
    vectors = torch.randn(6, 4, 11, generator=generator, dtype=torch.float32)

    def body(reducer: Reducer) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        state = SparseState(11, chunk=3)
        totals, masks = [], []
        for step in range(6):
            total, mask = sparse_sum(state, vectors[step, reducer.rank], reducer, count=2)
            totals.append(total)
            masks.append(mask)
        return torch.stack(totals), torch.stack(masks), state.residual

    found = with_reducers(CONFIG, 4, body)
    waiting = torch.stack([residual for _, _, residual in found]).sum(0)
    torch.testing.assert_close(found[0][0].sum(0) + waiting, vectors.sum((0, 1)))
    for totals, masks, _ in found[1:]:
        assert torch.equal(totals, found[0][0])
        assert torch.equal(masks, found[0][1])


def test_all_chunks_are_the_dense_sum_bit_for_bit() -> None:
    def body(reducer: Reducer) -> bool:
        vector = torch.randn(1001, generator=torch.Generator().manual_seed(reducer.rank))
        dense = vector.clone()
        reducer.start(dense).wait()
        state = SparseState(1001, chunk=10)
        return torch.equal(sparse_sum(state, vector, reducer, state.num_chunks)[0], dense)

    assert with_reducers(CONFIG, 3, body) == [True] * 3


@pytest.mark.parametrize(
    ("momentum_here", "expected"), [(0.9, [-2.9, -9.049, -17.8297]), (0.0, [-2.0, -5.8, -11.22])]
)
def test_momentum_correction(momentum_here: float, expected: list[float]) -> None:
    """A chunk sent every second step; without the correction the optimizer's momentum lags."""
    state = SparseState(1, chunk=1, momentum=momentum_here)
    weight, velocity, seen = 0.0, 0.0, []
    for step in range(1, 7):
        state.add(torch.ones(1))
        if step % 2 == 0:
            arrived = state.take(torch.tensor([True])).item()
            velocity = arrived if momentum_here else 0.9 * velocity + arrived
            weight -= velocity
            seen.append(weight)
    assert seen == pytest.approx(expected)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.data())
def test_ties_go_to_the_lowest_index(norms: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(0, len(norms)))
    chosen = choose_chunks(torch.tensor(norms, dtype=torch.float32), count).tolist()
    order = sorted(range(len(norms)), key=lambda index: (-norms[index], index))
    assert chosen == [index in order[:count] for index in range(len(norms))]


def test_the_first_epochs_are_dense() -> None:
    assert [sparsity(epoch) for epoch in (0, 4.9, 5, 5.9, 6, 7, 50)] == [
        0.0,
        0.0,
        0.5,
        0.5,
        0.75,
        0.85,
        0.85,
    ]


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="chunk = 0"):
        SparseState(3, chunk=0)
    with pytest.raises(ValueError, match=r"momentum = 1\.0"):
        SparseState(3, momentum=1.0)
