"""Phases by the backend's own collectives, as on NCCL; Gloo has the same calls and needs no GPU."""

from __future__ import annotations

import pytest
import torch
from ranks import as_threads
from torch.distributed import HashStore

from adaptive_platform.collectives import Membership, ProcessGroups, ReducerConfig
from adaptive_platform.collectives.native import NativePhases
from adaptive_platform.settings import variants_of


@pytest.mark.parametrize("kind", sorted(variants_of(ReducerConfig)))
@pytest.mark.parametrize("world_size", [2, 6])
def test_sums_for_lengths_that_do_and_do_not_divide(kind: str, world_size: int) -> None:
    store = HashStore()
    table = variants_of(ReducerConfig)[kind]().plans(world_size)

    def body(rank: int) -> list[torch.Tensor]:
        plans = [plan for _, plan in table]
        groups = ProcessGroups(
            Membership(store, rank, world_size),
            plans,
            torch.device("cpu"),
            timeout_seconds=20,
            join_seconds=20,
        )
        found = []
        for index, plan in enumerate(plans):
            phases = NativePhases(plan, index, groups, rank)
            for length in (7, 12, 7):
                buffer = torch.arange(length, dtype=torch.float64) * (rank + 1)
                phases.run(buffer)
                found.append(buffer)
        groups.close()
        return found

    factor = world_size * (world_size + 1) // 2
    for found in as_threads(world_size, body):
        for buffer in found:
            assert torch.equal(buffer, torch.arange(len(buffer), dtype=torch.float64) * factor)
