"""Plans of all variants, executed on plain vectors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptive_platform.collectives import Plan, ReducerConfig, simulate
from adaptive_platform.collectives.plan import Axis, Phase, whole_world
from adaptive_platform.collectives.schedules import Op
from adaptive_platform.settings import variants_of

VARIANTS = sorted(variants_of(ReducerConfig))


def config_of(kind: str) -> ReducerConfig:
    return variants_of(ReducerConfig)[kind]()


@pytest.mark.parametrize("kind", VARIANTS)
@settings(max_examples=30, deadline=None)
@given(world_size=st.integers(1, 64), length=st.integers(0, 200), data=st.data())
def test_every_rank_ends_with_the_sum(kind: str, world_size: int, length: int, data) -> None:
    nodes = data.draw(
        st.none()
        | st.lists(st.sampled_from("abcd"), min_size=world_size, max_size=world_size)
        | st.sampled_from([k for k in range(1, world_size + 1) if world_size % k == 0]).map(
            lambda k: [str(rank // k) for rank in range(world_size)]
        )
    )
    table = config_of(kind).plans(world_size, nodes)
    plan = data.draw(st.sampled_from([plan for _, plan in table]))
    generator = torch.Generator().manual_seed(world_size * 1000 + length)
    vectors = [
        torch.randint(-(2**40), 2**40, (length,), generator=generator) for _ in range(world_size)
    ]
    # Random 41-bit integers: a lost, doubled or misplaced element changes the exact sum.
    expected = torch.stack(vectors).sum(0)

    done = simulate(plan, vectors)

    assert all(torch.equal(result, expected) for result in done.results)
    assert list(done.elements_sent) == [plan.elements_sent(r, length) for r in range(world_size)]


@pytest.mark.parametrize("kind", VARIANTS)
def test_one_worker_sends_nothing(kind: str) -> None:
    plan = config_of(kind).plan(1)
    assert plan.phases == ()
    assert plan.elements_sent(0, 1000) == 0


@pytest.mark.parametrize("kind", VARIANTS)
@pytest.mark.parametrize("world_size", [2, 5, 8, 12])
def test_workers_of_a_group_share_their_span(kind: str, world_size: int) -> None:
    plan = config_of(kind).plan(world_size)
    spans = [plan.spans(rank, 1001) for rank in range(world_size)]
    for index, phase in enumerate(plan.phases):
        for group in phase.groups:
            assert len({spans[rank][index] for rank in group}) == 1


def test_a_plan_must_gather_what_it_scattered() -> None:
    (scatter,), (gather,) = whole_world(Op.REDUCE_SCATTER, 4), whole_world(Op.ALL_GATHER, 4)
    with pytest.raises(ValueError, match="never gathered"):
        Plan("x", 4, (1, 4), (scatter,))
    with pytest.raises(ValueError, match="must undo"):
        Plan("x", 4, (1, 4), (gather,))
    other = Phase(Op.ALL_GATHER, Axis.ROW, ((0, 1), (2, 3)))
    with pytest.raises(ValueError, match="must undo"):
        Plan("x", 4, (1, 4), (scatter, other))


def test_groups_are_disjoint_and_not_trivial() -> None:
    with pytest.raises(ValueError, match="share workers"):
        Phase(Op.ALL_REDUCE, Axis.ROW, ((0, 1), (1, 2)))
    with pytest.raises(ValueError, match="needs two workers"):
        Phase(Op.ALL_REDUCE, Axis.ROW, ((0,), (1, 2)))
    with pytest.raises(ValueError, match="beyond 2"):
        Plan("x", 2, (1, 2), whole_world(Op.ALL_REDUCE, 3))
