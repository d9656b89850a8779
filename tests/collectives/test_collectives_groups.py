"""Groups that come and go inside a living process, and what a missing worker leads to."""

from __future__ import annotations

import gc
import os
import time

import pytest
import torch
from ranks import as_threads, with_reducers
from torch.distributed import HashStore, TCPStore

from adaptive_platform.collectives import CollectiveError, Membership, Reducer, TorusConfig


def threads_and_files() -> tuple[int, int]:
    gc.collect()
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def settled(limit: tuple[int, int]) -> tuple[int, int]:
    """What is open once threads that are about to end have ended; waits while above `limit`."""
    for _ in range(100):
        now = threads_and_files()
        if now[0] <= limit[0] and now[1] <= limit[1]:
            break
        time.sleep(0.05)
    return now


def test_rebuilding_with_other_sizes_leaks_nothing() -> None:
    store = HashStore()
    config = TorusConfig(timeout_seconds=20)

    def body(reducer: Reducer) -> float:
        buffer = torch.ones(10)
        reducer.start(buffer).wait()
        return buffer.sum().item()

    def rebuild(generation: int) -> None:
        world_size = (2, 4, 3, 1)[generation % 4]
        found = with_reducers(config, world_size, body, store=store, generation=generation)
        assert found == [10.0 * world_size] * world_size

    for generation in range(4):
        rebuild(generation)
    before = threads_and_files()
    for generation in range(4, 204):
        rebuild(generation)
    after = settled(before)
    assert after[0] <= before[0]
    assert after[1] <= before[1]


def test_connections_to_the_store_close_without_the_garbage_collector() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    clients = [TCPStore("127.0.0.1", server.port, is_master=False) for _ in range(3)]

    def rebuild(generation: int) -> None:
        def body(rank: int) -> None:
            membership = Membership(clients[rank], rank, 3, generation)
            with Reducer(TorusConfig(timeout_seconds=20), membership) as reducer:
                reducer.start(torch.ones(10)).wait()

        as_threads(3, body)

    rebuild(0)
    settled(threads_and_files())
    before = len(os.listdir("/proc/self/fd"))
    gc.disable()
    try:
        for generation in range(1, 9):
            rebuild(generation)
        for _ in range(100):
            after = len(os.listdir("/proc/self/fd"))
            if after <= before:
                break
            time.sleep(0.05)
    finally:
        gc.enable()
    assert after <= before


def test_two_generations_live_side_by_side() -> None:
    store = HashStore()

    def body(rank: int) -> list[float]:
        config = TorusConfig(timeout_seconds=20)
        with Reducer(config, Membership(store, rank, 3, 0)) as old:
            results = [old.all_reduce(torch.ones(1)).item()]
            if rank < 2:
                with Reducer(config, Membership(store, rank, 2, 1)) as new:
                    results.append(new.all_reduce(torch.ones(1)).item())
            results.append(old.all_reduce(torch.ones(1)).item())
        return results

    assert as_threads(3, body) == [[3.0, 2.0, 3.0], [3.0, 2.0, 3.0], [3.0, 3.0]]


def test_a_generation_serves_once() -> None:
    store = HashStore()
    with_reducers(TorusConfig(timeout_seconds=20), 2, lambda r: r.barrier(), store=store)
    with pytest.raises(ValueError, match=r"already made a reducer of generation 0.*higher"):
        Reducer(TorusConfig(timeout_seconds=1), Membership(store, 0, 2))


def test_a_worker_that_never_joins_is_named() -> None:
    store = HashStore()

    def body(rank: int) -> str:
        if rank == 1:
            return ""
        with pytest.raises(CollectiveError) as caught:
            Reducer(TorusConfig(timeout_seconds=0.5), Membership(store, rank, 3, 7))
        assert caught.value.peers == (1,)
        return str(caught.value)

    said = as_threads(3, body)[0]
    for part in ("join in world", "generation 7", "limit 0.5 s", "no answer from worker 1"):
        assert part in said


def test_membership_is_checked() -> None:
    with pytest.raises(ValueError, match=r"rank 2 is not in \[0, 2\)"):
        Membership(HashStore(), 2, 2)
    with pytest.raises(ValueError, match="1 node names for 2 workers"):
        Membership(HashStore(), 0, 2, 0, ("a",))
