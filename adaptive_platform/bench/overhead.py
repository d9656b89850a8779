"""What the loop and its statistics cost over a bare PyTorch DDP loop: time per step and memory."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.nn import functional as F

from adaptive_platform.bench.processes import run_group
from adaptive_platform.bench.rows import Row, paired
from adaptive_platform.collectives import Membership
from adaptive_platform.data import PythonConfig, wrap_dataset
from adaptive_platform.models import ModelConfig
from adaptive_platform.recipe import Recipe, load_recipe
from adaptive_platform.training.run import TrainingRun

__all__ = ["overhead"]

_WORKERS = 2
_PER_WORKER = 32
_CLASSES = 10
_NEVER = 10**9
_RARELY = 10
_ARMS: dict[str, dict[str, Any]] = {
    "loop": {"statistics": {"every": _NEVER}},
    "statistics": {"lr_rule": {"kind": "adascale"}},
    "layers": {"lr_rule": {"kind": "adascale"}, "statistics": {"layers": True}},
    "vr": {"statistics": {"every": _NEVER}, "vr": {"every": _RARELY}},
}
"""Loops of ours and what each changes in the recipe."""


def overhead(*, quick: bool, models: tuple[str, ...] = ("resnet50", "resnet18")) -> list[Row]:
    """Alternate blocks of bare DDP and of our loop: without statistics, with them, and with more.

    `layers` adds norms of each layer, `vr` is VRGD refreshed every 10 steps; where fairscale is
    installed, its AdaScale around DDP runs in the same blocks. 2 workers of one thread, 32 images
    of 32x32 each, data in memory, SGD with momentum, fixed batch. Memory is the peak of a fresh
    process per loop.

    Args:
        quick: Few blocks of the first model and no memory, to end within a minute.
        models: torchvision models.
    """
    # A block of ten steps holds one refresh of VRGD.
    blocks, steps = (4, 2) if quick else (12, _RARELY)
    rows = []
    for model in models[:1] if quick else models:
        times = run_group(_WORKERS, _time_blocks, model, blocks, steps)[0]
        for case, ours, baseline in (
            ("loop over bare DDP", "loop", "bare"),
            ("loop with statistics over bare DDP", "statistics", "bare"),
            ("statistics over loop", "statistics", "loop"),
            ("statistics with layers over loop", "layers", "loop"),
            (f"VRGD every {_RARELY} steps over loop", "vr", "loop"),
            ("fairscale AdaScale over bare DDP", "fairscale", "bare"),
        ):
            if ours in times:
                name = f"{model}: {case}"
                rows.append(paired("overhead", name, "s/step", times[ours], times[baseline]))
        if not quick:
            rows += _memory(model)
    return rows


def _memory(model: str) -> list[Row]:
    peaks = {
        arm: [max(run_group(_WORKERS, _peak_mib, model, arm)) for _ in range(3)]
        for arm in ("bare", "loop", "statistics", "vr")
    }
    return [
        paired(
            "overhead", f"{model}: peak memory, {arm} over {base}", "MiB", peaks[arm], peaks[base]
        )
        for arm, base in (("statistics", "bare"), ("statistics", "loop"), ("vr", "loop"))
    ]


def _time_blocks(
    membership: Membership, model: str, blocks: int, steps: int
) -> dict[str, list[float]]:
    """Seconds per step of each block and arm, as rank 0 saw them."""
    _default_group(membership)
    arms = {
        "bare": _bare_loop(membership, model),
        **{
            name: _our_loop(membership, model, name, generation)
            for generation, name in enumerate(_ARMS, start=1)
        },
    }
    if find_spec("fairscale") is not None:
        arms["fairscale"] = _bare_loop(membership, model, adascale=True)
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for block in range(blocks + 1):  # the first one warms up
        for name, arm in arms.items():
            dist.barrier()
            started = time.perf_counter()
            for _ in range(steps):
                next(arm)
            dist.barrier()
            if block > 0:
                seconds[name].append((time.perf_counter() - started) / steps)
    dist.destroy_process_group()
    return seconds


def _peak_mib(membership: Membership, model: str, arm: str) -> float:
    if arm == "bare":
        _default_group(membership)
    loop = (
        _bare_loop(membership, model)
        if arm == "bare"
        else _our_loop(membership, model, arm, generation=1)
    )
    for _ in range(4):
        next(loop)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _default_group(membership: Membership) -> None:
    store = PrefixStore("bare", membership.store)
    dist.init_process_group(
        "gloo", store=store, rank=membership.rank, world_size=membership.world_size
    )


def _network(model: str) -> nn.Module:
    return ModelConfig(name=model).build(_CLASSES, seed=0)


def _images(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, 3, 32, 32, generator=generator)
    return inputs, torch.randint(_CLASSES, (count,), generator=generator)


def _bare_loop(membership: Membership, model: str, *, adascale: bool = False) -> Iterator[None]:
    """What a person would write: DDP, batches sliced from tensors in memory."""
    network = nn.parallel.DistributedDataParallel(_network(model))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    if adascale:
        wrapper = import_module("fairscale.optim").AdaScale
        optimizer = wrapper(optimizer, world_size=membership.world_size)
    inputs, targets = _images(8 * _PER_WORKER)
    while True:
        chosen = torch.randperm(len(inputs))[:_PER_WORKER]
        batch = inputs[chosen].contiguous(memory_format=torch.channels_last)
        optimizer.zero_grad()
        loss = F.cross_entropy(network(batch), targets[chosen])
        loss.backward()
        optimizer.step()
        loss.item()
        yield


class _InMemory(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __init__(self) -> None:
        self._inputs, self._targets = _images(8 * _PER_WORKER * _WORKERS)

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._inputs[index], self._targets[index]


def _our_loop(membership: Membership, model: str, arm: str, generation: int) -> Iterator[None]:
    """The platform's loop on the same work; one `next` is one optimizer step."""
    run = TrainingRun(
        _recipe(_ARMS[arm]),
        _network(model),
        wrap_dataset(_InMemory()),
        PythonConfig(),
        Membership(membership.store, membership.rank, membership.world_size, generation),
    )
    for batch in run:
        outputs = run.model(batch.inputs)
        run.backward(F.cross_entropy(outputs, batch.targets, reduction="none"), outputs)
        # The step is concluded when the next micro-batch is asked for, within the same block but
        # for the last one, on both sides of the comparison alike.
        yield


def _recipe(arm: dict[str, Any]) -> Recipe:
    content: dict[str, Any] = {
        "stop": {"epochs": 100000},
        "data": {"kind": "python"},
        "batch": {"kind": "fixed", "global_batch": _PER_WORKER * _WORKERS},
        "lr_rule": {"kind": "none"},
        "optimizer": {"kind": "sgd", "lr": 0.01, "momentum": 0.9},
        "schedule": {"kind": "cosine"},
        "reducer": {"kind": "ring"},
        "checkpoint": {"every": "0 epochs"},
        "report": {"evaluate_every": "0 epochs"},
    }
    return load_recipe(content | arm)
