"""Torch DDP with our hook against torch DDP without (field case F13)."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import as_processes, tcp_store, with_reducers
from torch import nn
from torch.distributed import PrefixStore
from torch.nn.parallel import DistributedDataParallel

from adaptive_platform.collectives import (
    CollectiveError,
    Membership,
    Reducer,
    RingConfig,
    TorusConfig,
)
from adaptive_platform.collectives.ddp_hook import DdpState, average

ITERATIONS = 10


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 3))


def ten_iterations(membership: Membership, group: dist.ProcessGroup) -> tuple[list[float], int]:
    """Two micro-batches per step, the first in `no_sync`; the gradients' largest difference."""
    # Buckets of about half a kilobyte: several per model.
    plain, ours = (
        DistributedDataParallel(network(), process_group=group, bucket_cap_mb=0.0005)
        for _ in range(2)
    )
    differences = []
    with Reducer(TorusConfig(timeout_seconds=20), membership) as reducer:
        state = DdpState(reducer)
        ours.register_comm_hook(state, average)
        for iteration in range(ITERATIONS):
            generator = torch.Generator().manual_seed(100 * iteration + membership.rank)
            inputs = torch.randn(2, 5, 7, generator=generator)
            for model in (plain, ours):
                model.zero_grad()
                for number, microbatch in enumerate(inputs):
                    with model.no_sync() if number == 0 else nullcontext():
                        model(microbatch).square().sum().backward()
            pairs = zip(plain.parameters(), ours.parameters(), strict=True)
            differences.append(max((a.grad - b.grad).abs().max().item() for a, b in pairs))
            with torch.no_grad():
                for model in (plain, ours):
                    for parameter in model.parameters():
                        parameter -= 0.01 * parameter.grad
        state.close()
        return differences, reducer.bytes_sent


def two_then_four(rank: int, world_size: int, port: int, queue: Any) -> None:
    torch.set_num_threads(1)
    store = tcp_store(port)
    dist.init_process_group(
        "gloo", store=PrefixStore("ddp", store), rank=rank, world_size=world_size
    )
    pair = dist.new_group([0, 1])
    found = {}
    if rank < 2:
        found[2] = ten_iterations(Membership(store, rank, 2, generation=0), pair)
    found[4] = ten_iterations(Membership(store, rank, 4, generation=1), dist.group.WORLD)
    queue.put(found)
    dist.destroy_process_group()


def test_equal_to_plain_averaging_at_every_iteration() -> None:
    found = as_processes(4, two_then_four, seconds=200)
    assert [sorted(found[rank]) for rank in range(4)] == [[2, 4], [2, 4], [4], [4]]
    for by_size in found.values():
        for differences, bytes_sent in by_size.values():
            assert len(differences) == ITERATIONS
            assert max(differences) < 1e-6
            assert bytes_sent > 0


def test_the_divisor_follows_the_number_of_workers() -> None:
    def body(reducer: Reducer) -> list[float]:
        state = DdpState(reducer)
        of_four = state.begin(torch.tensor([4.0, 8.0 * reducer.rank])).wait().tolist()
        alone = Reducer(RingConfig(), Membership(dist.HashStore(), 0, 1))
        state.replace(alone)
        of_one = state.begin(torch.tensor([4.0])).wait().tolist()
        state.close()
        return of_four + of_one

    found = with_reducers(TorusConfig(timeout_seconds=20), 4, body)
    assert found == [[4.0, 12.0, 4.0]] * 4


def test_division_comes_before_the_cast() -> None:
    """The sum of four is beyond half precision's largest number; the average is not."""

    def body(reducer: Reducer) -> torch.Tensor:
        state = DdpState(reducer, wire_dtype=torch.float16)
        found = state.begin(torch.full((5,), 60000.0)).wait()
        state.close()
        return found

    for found in with_reducers(TorusConfig(timeout_seconds=20), 4, body):
        assert found.dtype == torch.float32
        assert torch.equal(found, torch.full((5,), 60000.0))


def test_an_error_comes_out_of_the_future() -> None:
    def body(reducer: Reducer) -> str:
        state = DdpState(reducer)
        if reducer.rank == 1:
            reducer.close()
            state.close()
            return ""
        with pytest.raises(CollectiveError, match="all_reduce in world") as caught:
            state.begin(torch.ones(3)).wait()
        state.close()
        return str(caught.value)

    found = with_reducers(RingConfig(timeout_seconds=4), 2, body)
    assert "no answer from worker 1" in found[0]
