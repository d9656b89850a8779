"""PyTorch's PowerSGD hook as we attach it: what it misses comes later, also across a resume."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import as_processes, tcp_store
from torch import nn
from torch.distributed import PrefixStore
from torch.nn.parallel import DistributedDataParallel

from adaptive_platform.collectives.ddp_power_sgd import PowerSgdConfig, load, saved
from adaptive_platform.errors import CheckpointError

SHAPE = (24, 16)
STEPS = 12


def truth(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(SHAPE, generator=generator)


class Linear(nn.Module):
    """The gradient of its output is whatever goes in."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SHAPE))
        self.bias = nn.Parameter(torch.zeros(5))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return (self.weight * gradient).sum() + self.bias.sum() * gradient[0, 0]


def steps(model: DistributedDataParallel, rank: int, count: int) -> list[torch.Tensor]:
    found = []
    for _ in range(count):
        model.zero_grad()
        model(truth(rank)).backward()
        found.append(model.module.weight.grad.clone())
        assert torch.allclose(model.module.bias.grad, (truth(0) + truth(1))[0, 0] / 2)
    return found


def two_lives(rank: int, world_size: int, port: int, queue: Any, matrix_rank: int) -> None:
    torch.set_num_threads(1)
    store = PrefixStore("ddp", tcp_store(port))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    config = PowerSgdConfig(rank=matrix_rank, start_after=3, min_compression=1.0)
    first = DistributedDataParallel(Linear())
    state = config.attach(first)
    gradients = steps(first, rank, STEPS)
    file = io.BytesIO()
    torch.save(saved(state), file)
    file.seek(0)
    second = DistributedDataParallel(Linear())
    resumed = config.attach(second)
    load(resumed, torch.load(file, weights_only=True), torch.device("cpu"))
    gradients += steps(second, rank, STEPS)
    (left_over,) = resumed.error_dict.values()
    dist.all_reduce(left_over)
    mean = (truth(0) + truth(1)) / 2
    compressed = gradients[3:STEPS] + gradients[STEPS + 1 :]
    missed = mean * len(compressed) - torch.stack(compressed).sum(dim=0)
    _, whole, short = resumed.compression_stats()
    # Numbers only: what a process puts is read when it has ended, so it must fit into a pipe.
    queue.put(
        {
            "off": [float((each - mean).norm() / mean.norm()) for each in gradients],
            "ranks": [int(torch.linalg.matrix_rank(each, rtol=1e-4)) for each in compressed],
            "sums": [float(each.double().sum()) for each in gradients],
            "missed": float(missed.norm()),
            "left_over": float(left_over.norm()) / world_size,
            "shorter": short / whole,
        }
    )
    dist.destroy_process_group()


@pytest.mark.parametrize("matrix_rank", [1, 16])
def test_what_is_missed_comes_later_also_after_a_resume(matrix_rank: int) -> None:
    found = as_processes(2, two_lives, matrix_rank, seconds=120)
    assert sorted(found) == [0, 1]
    one = found[0]
    assert one["sums"] == found[1]["sums"]
    # Plain averages first, and once again after the resume.
    plain = [0, 1, 2, STEPS]
    off = [one["off"][step] for step in range(2 * STEPS) if step not in plain]
    assert max(one["off"][step] for step in plain) < 1e-6
    if matrix_rank == min(SHAPE):
        assert max(off) < 1e-4
        return
    assert one["ranks"] == [1] * (2 * STEPS - len(plain))
    assert one["shorter"] < 0.3
    assert min(off) > 0.1
    # All that was sent and what waits make up the truth: a resume without its state would fall
    # short of it by what had waited.
    assert one["missed"] == pytest.approx(one["left_over"], rel=1e-3)


def test_a_state_from_the_middle_of_a_step_is_refused() -> None:
    config = PowerSgdConfig()

    class Model:
        def register_comm_hook(self, state: object, hook: object) -> None: ...

    state = config.attach(Model())  # type: ignore[arg-type]
    content = saved(state) | {"errors": {0: torch.zeros(3)}}
    with pytest.raises(CheckpointError, match="between two steps"):
        load(state, content, torch.device("cpu"))
