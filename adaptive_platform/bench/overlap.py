"""How much of the gradients' reduction a step shows: what backward does not hide."""

from __future__ import annotations

import time
from itertools import islice
from typing import Any

import torch
from torch import nn

from adaptive_platform.bench.loops import WORKERS, our_loop
from adaptive_platform.bench.processes import run_group
from adaptive_platform.bench.rows import Row, paired
from adaptive_platform.collectives import AutoConfig, Membership, Reducer
from adaptive_platform.gradients.layout import bucket_layout
from adaptive_platform.models import ModelConfig
from adaptive_platform.report.records import StepRecord
from adaptive_platform.training.observer import SilentObserver

__all__ = ["overlap"]

_WARMUP_STEPS = 3


def overlap(*, quick: bool, model: str = "resnet50") -> list[Row]:
    """Steps of the loop in turn with its buckets reduced by themselves.

    Exposed is the time that worker 0 waits for sums after its backward has ended, which includes
    its wait for the other worker. 2 workers of one thread, 32 images of 32x32 each.

    Args:
        quick: Few steps, to end within a minute.
        model: torchvision model.
    """
    exposed, alone = run_group(WORKERS, _measure, model, 8 if quick else 40)[0]
    return [paired("overlap", f"{model}: exposed over the reduction alone", "s", exposed, alone)]


class _Watcher(SilentObserver):
    """Keeps what the last step reported."""

    last: StepRecord | None = None

    def step(self, record: StepRecord, fraction_done: float) -> None:
        self.last = record


def _measure(membership: Membership, model: str, steps: int) -> tuple[list[float], list[float]]:
    """Seconds of each step: exposed, and of the same buckets alone right after it."""
    watcher = _Watcher()
    buffers = _buffers(ModelConfig(name=model).build(10, seed=0))
    exposed: list[float] = []
    alone: list[float] = []
    loop = our_loop(membership, model, "sgd", "loop", 1, observer=watcher)
    apart = Membership(membership.store, membership.rank, membership.world_size, 2)
    with Reducer(AutoConfig(timeout_seconds=300.0), apart) as reducer:
        for _ in islice(loop, _WARMUP_STEPS):
            _reduce(reducer, buffers)
        for _ in islice(loop, steps):
            seconds = _reduce(reducer, buffers)
            if watcher.last is not None:  # on worker 0
                exposed.append(watcher.last.reduce_seconds)
                alone.append(seconds)
    return exposed, alone


def _buffers(network: nn.Module) -> list[torch.Tensor]:
    sizes = [parameter.numel() for parameter in network.parameters()]
    layout = bucket_layout([4 * size for size in sizes], int(AutoConfig().bucket_mib * 2**20))
    return [torch.zeros(sum(sizes[index] for index in members)) for members in layout]


def _reduce(reducer: Reducer, buffers: list[torch.Tensor]) -> float:
    reducer.barrier()
    began = time.perf_counter()
    pending: list[Any] = [reducer.start(buffer) for buffer in buffers]
    for each in pending:
        each.wait()
    return time.perf_counter() - began
