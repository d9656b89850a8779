"""Large buffers go through the phases in slices: same sums, same bits, same bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import with_reducers

from adaptive_platform.collectives import (
    CollectiveError,
    HierarchicalConfig,
    Reducer,
    ReducerConfig,
    TorusConfig,
    gloo,
)
from adaptive_platform.collectives.script import Act, write_script

LENGTH = 150_007  # with segments of 64 KiB: four slices, none of which divides evenly


def sums(config: ReducerConfig, world_size: int) -> list[tuple[torch.Tensor, int]]:
    def body(reducer: Reducer) -> tuple[torch.Tensor, int]:
        buffers = [torch.arange(LENGTH, dtype=torch.float32) % 97 + reducer.rank for _ in range(2)]
        for pending in [reducer.start(buffer) for buffer in buffers]:
            pending.wait()
        assert torch.equal(*buffers)
        return buffers[0], reducer.bytes_sent

    nodes = tuple(f"host{rank % 2}" for rank in range(world_size))
    return with_reducers(config, world_size, body, nodes=nodes)


@pytest.mark.parametrize("kind", [TorusConfig, HierarchicalConfig])
@pytest.mark.parametrize("world_size", [4, 6])
def test_sums_do_not_depend_on_the_slices(kind: type[ReducerConfig], world_size: int) -> None:
    whole = sums(kind(slices=1, segment_kib=64, timeout_seconds=20), world_size)
    sliced = sums(kind(slices=4, segment_kib=64, timeout_seconds=20), world_size)
    ranks = sum(range(world_size))
    expected = world_size * (torch.arange(LENGTH) % 97).float() + ranks
    for (a, bytes_a), (b, bytes_b) in zip(whole, sliced, strict=True):
        assert torch.equal(a, expected)
        assert torch.equal(b, expected)
        assert bytes_a == bytes_b


@pytest.mark.parametrize(("nodes", "expected"), [("aaaa", 1), ("aabb", 3)])
def test_one_machine_is_not_worth_slices(
    monkeypatch: pytest.MonkeyPatch, nodes: str, expected: int
) -> None:
    counts: list[int] = []
    cut = gloo.GlooExecutor._slices

    def spied(self: gloo.GlooExecutor, num_bytes: int) -> int:
        found = cut(self, num_bytes)
        counts.append(found)
        return found

    monkeypatch.setattr(gloo.GlooExecutor, "_slices", spied)
    config = TorusConfig(segment_kib=64, timeout_seconds=20)
    # 96 KiB over four workers, whose shares have at least 8 KiB: a slice has at least 32 KiB.
    buffer_length = 24 * 1024
    with_reducers(
        config, 4, lambda r: r.start(torch.zeros(buffer_length)).wait(), nodes=tuple(nodes)
    )
    assert counts == [expected] * 4


def test_the_next_slice_does_not_wait_for_the_sum_between_rows() -> None:
    plan = TorusConfig(grid=(2, 2)).plan(4)
    script = write_script(plan, 0, LENGTH, segment=2**14, in_flight=4, num_slices=4)
    sums = [i.act for i in script.instructions if i.act in (Act.BEGIN_SUM, Act.AWAIT_SUM)]
    assert sums == [Act.BEGIN_SUM] * 4 + [Act.AWAIT_SUM] * 4


def test_a_short_buffer_is_not_handed_to_the_backend() -> None:
    plan = TorusConfig(grid=(2, 2)).plan(4)
    script = write_script(plan, 0, LENGTH, segment=2**14, in_flight=4, native=False)
    assert not any(i.act in (Act.BEGIN_SUM, Act.AWAIT_SUM) for i in script.instructions)


def test_no_connection_carries_messages_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo's thread can't read from a connection that is being written to."""
    ways: list[tuple[int, int, bool]] = []
    find = gloo.GlooExecutor._way

    def spied(self: gloo.GlooExecutor, *args: Any, leaving: bool) -> Any:
        found = find(self, *args, leaving=leaving)
        ways.append((id(found.backend), found.peer, leaving))
        return found

    monkeypatch.setattr(gloo.GlooExecutor, "_way", spied)
    config = TorusConfig(timeout_seconds=20)
    with_reducers(config, 4, lambda reducer: reducer.start(torch.zeros(LENGTH)).wait())
    assert len(ways) == 4 * 2 * 4  # halves of rows and columns, to and from, of four workers
    used = {(backend, peer): leaving for backend, peer, leaving in ways}
    assert all(used[backend, peer] == leaving for backend, peer, leaving in ways)


def test_a_lost_worker_ends_all_slices_on_everyone() -> None:
    def body(reducer: Reducer) -> str:
        if reducer.rank == 3:
            reducer.close()
            return "left"
        with pytest.raises(CollectiveError) as caught:
            reducer.start(torch.zeros(LENGTH)).wait()
        assert 3 in caught.value.peers
        return caught.value.group

    config = TorusConfig(slices=4, segment_kib=64, timeout_seconds=6)
    found = with_reducers(config, 4, body, nodes=tuple("aabb"))
    assert found[3] == "left"
    assert all(group.startswith(("row", "column")) for group in found[:3])
