"""Two half-buckets that go opposite ways round: the same sums, the same bytes, both links busy."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import with_reducers

from adaptive_platform.collectives import (
    Plan,
    Reducer,
    ReducerConfig,
    RingConfig,
    TorusConfig,
    simulate,
)
from adaptive_platform.collectives import cost as cost_of
from adaptive_platform.collectives.cost import Link, Links
from adaptive_platform.collectives.schedules import chunk_bounds, piece_bounds, rounds_of

KINDS = [RingConfig, TorusConfig]


def elements_between(plan: Plan, length: int) -> Counter[tuple[int, int]]:
    """What each worker sends to each other one."""
    found: Counter[tuple[int, int]] = Counter()
    for rank in range(plan.world_size):
        for phase, span in zip(plan.phases, plan.spans(rank, length), strict=True):
            place = phase.place(rank)
            assert place is not None
            group = phase.groups[place[0]]
            bounds = piece_bounds(phase.algorithm, span.start, span.stop, len(group))
            for turn in rounds_of(phase.op, phase.algorithm, len(group), place[1]):
                if turn.send is not None:
                    sent = bounds[turn.send.stop] - bounds[turn.send.start]
                    found[rank, group[turn.send.peer]] += sent
    return found


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25)
@given(world_size=st.integers(1, 16), length=st.integers(0, 60))
def test_sums_bytes_and_shards_are_those_of_one_direction(kind, world_size, length):
    one, both = (kind(both_directions=each).plan(world_size) for each in (False, True))
    generator = torch.Generator().manual_seed(length)
    vectors = [
        torch.randint(-(2**40), 2**40, (length,), generator=generator) for _ in range(world_size)
    ]
    done = simulate(both, vectors)
    for result in done.results:
        assert torch.equal(result, torch.stack(vectors).sum(0))
    assert done.rounds == simulate(one, vectors).rounds
    halves, of_one = both.in_halves(), one.in_halves()
    for rank in range(world_size):
        assert done.elements_sent[rank] == both.elements_sent(rank, length)
        assert halves.shard(rank, length) == of_one.shard(rank, length)
    # Halves of chunks differ by an element, so single workers may send a few more or fewer.
    assert sum(done.elements_sent) == sum(one.elements_sent(r, length) for r in range(world_size))


@pytest.mark.parametrize(("config", "world_size"), [(RingConfig, 5), (TorusConfig, 12)])
def test_every_link_carries_half_each_way(config, world_size):
    length = 2 * 5 * 12
    one, both = (
        elements_between(config(both_directions=each).plan(world_size), length)
        for each in (False, True)
    )
    for rank in range(world_size):
        sent = [sum(n for (a, _), n in found.items() if a == rank) for found in (one, both)]
        assert sent[0] == sent[1]
    # A row of four or a ring of five: what went to one neighbour goes to two, in halves.
    ring = {pair: n for pair, n in both.items() if pair[::-1] not in one and pair in one}
    assert ring
    for (source, target), n in ring.items():
        assert 2 * n == one[source, target]
        assert both[target, source] == n


@given(size=st.integers(1, 50), start=st.integers(0, 9), length=st.integers(0, 300))
def test_pieces_cut_chunks_in_halves(size, start, length):
    """So a reduce-scatter leaves everyone with a whole chunk, whichever way it came."""
    for config in (RingConfig(both_directions=True), RingConfig()):
        phases = config.plan(max(size, 2)).phases
        pieces = piece_bounds(phases[0].algorithm, start, start + length, size)
        step = (len(pieces) - 1) // size
        assert pieces[::step] == chunk_bounds(start, start + length, size)


@pytest.mark.parametrize("wire", [None, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [2, 3, 4, 6])
def test_workers_agree_on_real_groups(kind, world_size, wire):
    fields = {"segment_kib": 4} if kind is TorusConfig else {}
    config: ReducerConfig = kind(both_directions=True, timeout_seconds=20, **fields)

    def body(reducer: Reducer) -> list[torch.Tensor]:
        found = []
        for length in (1, 7, 5003):
            buffer = torch.arange(float(length)) % 4 + reducer.rank % 2
            before = reducer.bytes_sent
            reducer.start(buffer, wire).wait()
            itemsize = 4 if wire is None else wire.itemsize
            sent = reducer.plan.elements_sent(reducer.rank, length)
            assert reducer.bytes_sent - before == itemsize * sent
            reducer.start(buffer, wire, visit=lambda shard: shard.mul_(0.5)).wait()
            found.append(buffer)
        return found

    results = with_reducers(config, world_size, body)
    for index, length in enumerate((1, 7, 5003)):
        total = torch.arange(float(length)) % 4 * world_size + world_size // 2
        for result in results:
            assert torch.equal(result[index], total * world_size / 2)


def test_it_costs_the_same_behind_a_switch():
    links = Links(remote=Link(latency_seconds=1e-4, bytes_per_second=1e9))
    for kind in KINDS:
        one, both = (kind(both_directions=each).plan(12) for each in (False, True))
        assert cost_of(both, 1e6, links) == pytest.approx(cost_of(one, 1e6, links))
