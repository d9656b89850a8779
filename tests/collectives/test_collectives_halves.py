"""The moment between the two halves of a reduction: shards, visits, bytes, all plans alike."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import as_threads, with_reducers
from torch.distributed import HashStore

from adaptive_platform.collectives import (
    Membership,
    ProcessGroups,
    Reducer,
    ReducerConfig,
    RingConfig,
    TorusConfig,
    simulate,
)
from adaptive_platform.collectives.native import NativePhases
from adaptive_platform.collectives.plan import Plan
from adaptive_platform.settings import variants_of

VARIANTS = sorted(variants_of(ReducerConfig))
LENGTHS = (0, 1, 7, 1000, 5003)


def config_of(kind: str) -> ReducerConfig:
    cls = variants_of(ReducerConfig)[kind]
    return cls(
        timeout_seconds=20, **({"segment_kib": 4} if "segment_kib" in cls.model_fields else {})
    )


def plan_of(kind: str, world_size: int) -> Plan:
    return config_of(kind).plan(world_size).in_halves()


@pytest.mark.parametrize("kind", VARIANTS)
@settings(max_examples=25)
@given(world_size=st.integers(1, 20), length=st.integers(0, 60))
def test_shards_make_up_the_buffer_and_the_sum_is_the_same(kind, world_size, length):
    plan = plan_of(kind, world_size)
    spans = [plan.shard(rank, length) for rank in range(world_size)]
    covered = sorted(i for span in spans for i in range(span.start, span.stop))
    assert covered == list(range(length))
    vectors = [torch.arange(float(length)) * (rank + 1) for rank in range(world_size)]
    for result in simulate(plan, vectors).results:
        assert torch.equal(result, torch.stack(vectors).sum(dim=0))


@pytest.mark.parametrize("kind", VARIANTS)
@pytest.mark.parametrize("world_size", [2, 5, 6, 8])
def test_halves_send_what_the_whole_sends(kind, world_size):
    """So squares that are only scattered cost half of a gradient's sum."""
    whole, halves = config_of(kind).plan(world_size), plan_of(kind, world_size)
    middle = halves.first_half
    for length in (240, 1001):
        sent = [
            sum(plan.elements_sent(rank, length, part) for rank in range(world_size))
            for plan, part in (
                (whole, slice(None)),
                (halves, slice(middle)),
                (halves, slice(middle, None)),
            )
        ]
        assert sent[1] + sent[2] == sent[0]
        assert sent[1] == sent[2]


def test_a_plan_with_an_all_reduce_has_no_shards():
    with pytest.raises(ValueError, match="only a plan in halves"):
        RingConfig().plan(3).shard(0, 10)


def test_the_shards_of_a_torus_are_equal():
    plan = TorusConfig(grid=(2, 3)).plan(6).in_halves()
    assert sorted(plan.shard(rank, 60).length for rank in range(6)) == [10] * 6


@pytest.mark.parametrize("wire", [None, torch.bfloat16])
@pytest.mark.parametrize("kind", VARIANTS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 6])
def test_a_visit_changes_the_sum_for_all(kind, world_size, wire):
    def body(reducer: Reducer) -> list[torch.Tensor]:
        buffers = [torch.arange(float(n)) % 8 * (reducer.rank + 1) for n in LENGTHS]
        seen: list[torch.Tensor] = []

        def visit(shard: torch.Tensor) -> None:
            seen.append(shard.clone())
            shard.mul_(4.0).add_(reducer.rank)

        for pending in [reducer.start(each, wire, visit=visit) for each in buffers]:
            pending.wait()
        for buffer, shard in zip(buffers, seen, strict=True):
            span = reducer.shard(len(buffer))
            assert span.length == len(shard)
        return [*buffers, *seen]

    results = with_reducers(config_of(kind), world_size, body)
    plan = plan_of(kind, world_size)
    factor = world_size * (world_size + 1) // 2
    for index, length in enumerate(LENGTHS):
        total = torch.arange(float(length)) % 8 * factor
        expected = total * 4
        for rank in range(world_size):
            span = plan.shard(rank, length)
            mine = results[rank][len(LENGTHS) + index]
            assert torch.equal(mine, total[span.start : span.stop])
            expected[span.start : span.stop] += rank
        if wire is not None and world_size > 1:
            expected = expected.to(wire).float()
        for result in results:
            assert torch.equal(result[index], expected)


@pytest.mark.parametrize("kind", VARIANTS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_the_halves_one_by_one(kind, world_size):
    """What one worker writes between them reaches the others."""

    def body(reducer: Reducer) -> tuple[torch.Tensor, torch.Tensor, int]:
        summed, squares = (torch.full((1001,), float(reducer.rank + k)) for k in (1, 2))
        waiting = [reducer.scatter(summed), reducer.scatter(squares)]
        for pending in waiting:
            pending.wait()
        span = reducer.shard(1001)
        summed[span.start : span.stop] /= squares[span.start : span.stop]
        before = reducer.bytes_sent
        reducer.gather(summed).wait()
        return summed, torch.tensor(before), reducer.bytes_sent

    results = with_reducers(config_of(kind), world_size, body)
    one, two = (sum(rank + k for rank in range(world_size)) for k in (1, 2))
    for summed, _, _ in results:
        assert torch.equal(summed, torch.full((1001,), float(one)) / two)
    # Two scatters, one gather: three halves.
    plan = plan_of(kind, world_size)
    middle = plan.first_half
    for rank, (_, before, after) in enumerate(results):
        scattered = plan.elements_sent(rank, 1001, slice(middle))
        assert int(before) == 2 * 4 * scattered
        assert after - int(before) == 4 * plan.elements_sent(rank, 1001, slice(middle, None))


def test_an_error_in_a_visit_comes_out_of_wait():
    def body(reducer: Reducer) -> str:
        def visit(shard: torch.Tensor) -> None:
            raise ZeroDivisionError("in the visit")

        pending = reducer.start(torch.zeros(8), visit=visit)
        with pytest.raises(ZeroDivisionError) as caught:
            pending.wait()
        return str(caught.value)

    assert with_reducers(RingConfig(timeout_seconds=5), 2, body) == ["in the visit"] * 2


@pytest.mark.parametrize("kind", VARIANTS)
@pytest.mark.parametrize("world_size", [2, 6])
def test_the_backends_own_collectives_in_halves(kind, world_size):
    """As on NCCL: lengths that do not divide are padded, and shards end where the buffer ends."""
    store, plan = HashStore(), plan_of(kind, world_size)
    middle = plan.first_half

    def body(rank: int) -> list[tuple[range, torch.Tensor]]:
        groups = ProcessGroups(
            Membership(store, rank, world_size),
            [plan],
            torch.device("cpu"),
            timeout_seconds=20,
            join_seconds=20,
        )
        phases = NativePhases(plan, 0, groups, rank)
        found = []
        for length in (7, 12, 1):
            buffer = torch.arange(length, dtype=torch.float64) * (rank + 1)
            phases.run(buffer, slice(middle))
            span = phases.shard(length)
            buffer[span.start : span.stop] *= 10
            phases.run(buffer, slice(middle, None))
            found.append((range(span.start, span.stop), buffer))
        groups.close()
        return found

    factor = 10 * world_size * (world_size + 1) // 2
    results = as_threads(world_size, body)
    for case, length in enumerate((7, 12, 1)):
        assert sorted(i for found in results for i in found[case][0]) == list(range(length))
        for found in results:
            expected = torch.arange(length, dtype=torch.float64) * factor
            assert torch.equal(found[case][1], expected)
