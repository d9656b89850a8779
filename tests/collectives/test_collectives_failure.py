"""A lost or stuck worker ends the operation on all others within the limit, by name."""

from __future__ import annotations

import os
import pickle
import signal
import time
from typing import Any

import pytest
import torch
from ranks import as_processes, as_threads, tcp_store
from torch.distributed import HashStore

from adaptive_platform.collectives import CollectiveError, Membership, Reducer, TorusConfig

TIMEOUT_SECONDS = 40.0


def _train_until_peer_is_lost(
    rank: int, world_size: int, port: int, queue: Any, signal_number: int
) -> None:
    store = tcp_store(port)
    config = TorusConfig(timeout_seconds=TIMEOUT_SECONDS, grid=(2, 2), segment_kib=16)
    reducer = Reducer(config, Membership(store, rank, world_size))
    buffer = torch.ones(200_000)
    reducer.start(buffer).wait()
    if rank == world_size - 1:
        os.kill(os.getpid(), signal_number)
    try:
        for _ in range(3):
            reducer.start(buffer).wait()
    except CollectiveError as error:
        reducer.close()
        # The survivors go on at once, in the same processes, with one worker less.
        with Reducer(
            TorusConfig(timeout_seconds=20), Membership(store, rank, world_size - 1, 1)
        ) as smaller:
            total = smaller.all_reduce(torch.ones(1)).item()
        queue.put((str(error), error.peers, total))


def test_survivors_of_a_killed_worker_go_on() -> None:
    found = as_processes(4, _train_until_peer_is_lost, signal.SIGKILL)
    assert sorted(found) == [0, 1, 2]
    for message, peers, total in found.values():
        assert peers == (3,), message
        assert "worker 3" in message
        assert "limit 40 s" in message
        assert "Timed out" not in message, "noticed only by the time limit"
        assert total == 3.0


def test_a_worker_that_stops_answering_is_given_up_after_the_limit() -> None:
    store = HashStore()
    timeout_seconds = 1.0

    def body(rank: int) -> tuple[str, tuple[int, ...]]:
        config = TorusConfig(timeout_seconds=timeout_seconds, grid=(2, 2))
        reducer = Reducer(config, Membership(store, rank, 4))
        reducer.barrier()
        if rank == 3:  # alive and connected, but it does not take part
            time.sleep(4 * timeout_seconds)
            reducer.close()
            return "", ()
        with pytest.raises(CollectiveError) as caught:
            reducer.start(torch.ones(1000)).wait()
        with pytest.raises(CollectiveError):
            reducer.start(torch.ones(1000))
        with pytest.raises(CollectiveError):
            reducer.barrier()
        reducer.close()
        return str(caught.value), caught.value.peers

    for message, peers in as_threads(4, body)[:3]:
        assert peers == (3,), message
        assert "(workers " in message
        assert "generation 0" in message


@pytest.mark.parametrize("leaver", [0, 5])
def test_a_failure_spreads_to_workers_without_a_link_to_the_lost_one(leaver: int) -> None:
    """2 x 3 grid: most workers neither share a row ring edge nor a column with the leaver."""
    store = HashStore()

    def body(rank: int) -> CollectiveError | None:
        config = TorusConfig(timeout_seconds=40, grid=(2, 3))
        reducer = Reducer(config, Membership(store, rank, 6))
        reducer.start(torch.ones(999)).wait()
        if rank == leaver:
            reducer.close()
            return None
        with pytest.raises(CollectiveError) as caught:
            reducer.start(torch.ones(999)).wait()
        reducer.close()
        return caught.value

    for error in as_threads(6, body):
        if error is not None:
            assert error.peers == (leaver,), str(error)
            assert "Timed out" not in str(error)


def test_queued_operations_fail_with_the_first() -> None:
    store = HashStore()

    def body(rank: int) -> None:
        reducer = Reducer(TorusConfig(timeout_seconds=0.5), Membership(store, rank, 2))
        reducer.barrier()
        if rank == 0:
            pending = [reducer.start(torch.ones(10)) for _ in range(3)]
            errors = []
            for each in pending:
                with pytest.raises(CollectiveError) as caught:
                    each.wait()
                errors.append(str(caught.value))
            assert len(set(errors)) == 1
        else:
            time.sleep(2.0)
        reducer.close()

    as_threads(2, body)


def test_the_error_survives_the_pickling_that_ray_does():
    error = CollectiveError(
        operation="reduce",
        group="row 0 (workers 0, 1)",
        rank=0,
        world_size=2,
        generation=3,
        timeout_seconds=30.0,
        after_seconds=1.5,
        peers=(1,),
        reason="Connection closed by peer",
    )
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.peers, copy.generation) == (str(error), (1,), 3)
