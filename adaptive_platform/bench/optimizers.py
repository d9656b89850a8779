"""What optimizers cost: each against SGD or AdamW in turn, and kfac-pytorch where installed."""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from adaptive_platform.bench.processes import run_group
from adaptive_platform.bench.rows import Row, paired
from adaptive_platform.collectives import Membership
from adaptive_platform.data import PythonConfig, wrap_dataset
from adaptive_platform.errors import UserError
from adaptive_platform.models import ModelConfig
from adaptive_platform.optimizers import Exchange
from adaptive_platform.optimizers.natural.blocks import KroneckerBlock
from adaptive_platform.optimizers.natural.coverage import cover
from adaptive_platform.optimizers.natural.kronecker import NaturalGradient
from adaptive_platform.optimizers.natural.workers import Workers
from adaptive_platform.recipe import Recipe, load_recipe
from adaptive_platform.training.run import TrainingRun

__all__ = ["optimizers"]

_WORKERS = 2
_CLASSES = 10
_MIB = 2**20
_RESNET50_FACTORS_MIB = 586.9
"""A and G of ResNet-50 at 224x224 as full float32 matrices, from its layers' shapes."""
_KFAC_LIBRARY = "kfac-pytorch"

_FIRST_ORDER = {
    "sgd": {"kind": "sgd", "lr": 0.01},
    "adamw": {"kind": "adamw", "lr": 1e-3},
    "lars": {"kind": "lars", "lr": 1.0},
    "lamb": {"kind": "lamb", "lr": 1e-3},
}
_SECOND_ORDER = {
    "sgd": {"kind": "sgd", "lr": 0.01},
    "sp_ngd": {"kind": "sp_ngd", "lr": 1e-3, "momentum": 0.9, "damping": 1e-3},
}


@dataclass(frozen=True)
class _Stage:
    """A network, its images, and how long it is watched."""

    model: str
    pixels: int
    per_worker: int
    arms: dict[str, dict[str, Any]]
    warm_up: int
    blocks: int
    steps: int
    """Of one block."""
    library: bool = False
    """Also time kfac-pytorch, where it is installed."""

    @property
    def title(self) -> str:
        return f"{self.model} at {self.pixels}x{self.pixels}, {self.per_worker} per worker"


_QUICK = (
    _Stage("resnet20_cifar", 32, 32, _FIRST_ORDER, 2, 5, 2),
    _Stage("resnet20_cifar", 32, 32, _SECOND_ORDER, 6, 5, 4),
)
_FULL = (
    _Stage("resnet18", 32, 32, _FIRST_ORDER, 4, 20, 4),
    _Stage("resnet20_cifar", 32, 128, _SECOND_ORDER, 20, 20, 10),
    _Stage("resnet18", 32, 64, _SECOND_ORDER, 20, 20, 10, library=True),
    _Stage("resnet50", 32, 32, _SECOND_ORDER, 10, 10, 4, library=True),
    _Stage("resnet50", 224, 32, _SECOND_ORDER, 3, 5, 1),
)


def optimizers(*, quick: bool, stages: tuple[str, ...] = ()) -> list[Row]:
    """Alternate blocks of steps with each optimizer, in 2 workers of one thread, data in memory.

    LARS and LAMB are held against torch's SGD and AdamW, `sp_ngd` against SGD and, where it is
    installed, kfac-pytorch around DDP with its inverse method at intervals 10 and 100. The loop is
    the platform's own on all sides but kfac-pytorch's. The first steps, in which everything is made
    for the first time, do not count. CPU time is that of the busiest worker's process; it hardly
    sees what else runs on the machine, nor waiting. Memory is the peak of a fresh process per
    optimizer, and what one worker of one and of two keeps of factors and inverses; for ResNet-50
    the factors also follow from shapes alone.

    Args:
        quick: Small networks and few blocks, to end within a minute.
        stages: Titles to measure, such as `resnet18 at 32x32, 64 per worker`; all where empty.

    Raises:
        UserError: There is no such stage.
    """
    rows: list[Row] = []
    known = _QUICK if quick else _FULL
    titles = [stage.title for stage in known]
    for title in stages:
        if title not in titles:
            raise UserError(f"--case = {title}: must be one of {'; '.join(titles)}.")
    for stage in known:
        if stages and stage.title not in stages:
            continue
        found = run_group(_WORKERS, _take_turns, stage)
        wall = found[0][0]
        cpu = {
            arm: [max(each) for each in zip(*(cpu[arm] for _, cpu in found), strict=True)]
            for arm in wall
        }
        rows += _compare(stage, wall, "s") + _compare(stage, cpu, "CPU s")
        if not quick:
            rows += _memory(stage)
    rows += _factors_per_worker()
    if not quick and find_spec("kfac") is None:
        note = f"{_KFAC_LIBRARY} is not installed: left out (pip install {_KFAC_LIBRARY})."
        print(note, file=sys.stderr)
    return rows


def _compare(stage: _Stage, found: dict[str, list[float]], unit: str) -> list[Row]:
    """Rows of one stage; a block's figure is its mean, so that rare expensive steps count."""
    blocks = {
        arm: [
            statistics.mean(seconds[start : start + stage.steps])
            for start in range(0, len(seconds), stage.steps)
        ]
        for arm, seconds in found.items()
    }
    rows = []
    for ours, baseline in (
        ("lars", "sgd"),
        ("lamb", "adamw"),
        ("sp_ngd", "sgd"),
        (_KFAC_LIBRARY, "sgd"),
        ("sp_ngd", _KFAC_LIBRARY),
    ):
        if ours in blocks and baseline in blocks:
            case = f"{stage.title}: {ours} over {baseline}"
            rows.append(paired("optimizers", case, f"{unit}/step", blocks[ours], blocks[baseline]))
    for arm in ("sp_ngd", _KFAC_LIBRARY):
        if arm in found:
            longest, median = max(found[arm]), statistics.median(found[arm])
            rows.append(
                Row(
                    bench="optimizers",
                    case=f"{stage.title}: longest step over median step, {arm}",
                    value=longest,
                    unit=unit,
                    baseline=median,
                    ratio=longest / median,
                    repeats=len(found[arm]),
                )
            )
    return rows


def _memory(stage: _Stage) -> list[Row]:
    rows = []
    first = next(iter(stage.arms))
    peaks = {
        arm: max(each["peak_mib"] for each in run_group(_WORKERS, _measure_memory, stage, arm))
        for arm in stage.arms
    }
    for arm in list(stage.arms)[1:]:
        case = f"{stage.title}: peak memory of a worker, {arm} over {first}"
        rows.append(paired("optimizers", case, "MiB", [peaks[arm]], [peaks[first]]))
    if "sp_ngd" in stage.arms and stage.pixels < 224:
        one, two = (
            max(each["kept_mib"] for each in run_group(n, _measure_memory, stage, "sp_ngd"))
            for n in (1, 2)
        )
        case = f"{stage.title}: factors and inverses per worker, of two workers over one"
        rows.append(paired("optimizers", case, "MiB", [two], [one]))
    elif "sp_ngd" in stage.arms:
        kept = run_group(2, _measure_memory, stage, "sp_ngd")
        case = f"{stage.title}: factors and inverses per worker of two, over the factors of all"
        most = max(each["kept_mib"] for each in kept)
        rows.append(paired("optimizers", case, "MiB", [most], [_RESNET50_FACTORS_MIB]))
    return rows


def _factors_per_worker() -> list[Row]:
    """A and G of ResNet-50 as full matrices on the fullest worker, from its layers' shapes."""
    layers = cover(ModelConfig(name="resnet50").build(1000, seed=0), norms=False).layers
    blocks = [KroneckerBlock(layer, keeps_rows=False) for layer in layers]
    rows = []
    for world_size in (1, 2, 8, 32):
        workers = Workers(Exchange(world_size=world_size), fraction=0.0)
        workers.place(blocks)
        kept = [0.0] * world_size
        for block in blocks:
            elements = sum(part.side**2 for part in block.parts.values())
            kept[workers.placement(block).owner] += elements * 4 / _MIB
        case = f"resnet50 at 224x224: factors per worker of {world_size}, from shapes"
        rows.append(paired("optimizers", case, "MiB", [max(kept)], [_RESNET50_FACTORS_MIB]))
    return rows


def _take_turns(
    membership: Membership, stage: _Stage
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Wall and CPU seconds of each step by arm; a step ends on all workers together."""
    loops: dict[str, Iterator[object]] = {
        name: _Loop(membership, stage, optimizer, generation).steps()
        for generation, (name, optimizer) in enumerate(stage.arms.items(), start=1)
    }
    if stage.library and find_spec("kfac") is not None:
        loops[_KFAC_LIBRARY] = _library_steps(membership, stage)
    wall: dict[str, list[float]] = {name: [] for name in loops}
    cpu: dict[str, list[float]] = {name: [] for name in loops}
    for block in range(stage.blocks + 1):
        for name, loop in loops.items():
            for _ in range(stage.steps if block else stage.warm_up):
                started, used = time.perf_counter(), time.process_time()
                next(loop)
                if block:
                    cpu[name].append(time.process_time() - used)
                    wall[name].append(time.perf_counter() - started)
    return wall, cpu


def _measure_memory(membership: Membership, stage: _Stage, arm: str) -> dict[str, float]:
    loop = _Loop(membership, stage, stage.arms[arm], generation=1)
    steps = loop.steps()
    for _ in range(3 if stage.pixels < 224 else 2):
        next(steps)
    optimizer = loop.run.optimizer
    kept = optimizer.curvature.num_bytes if isinstance(optimizer, NaturalGradient) else 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"peak_mib": peak, "kept_mib": kept / _MIB}


class _Images(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Noise with a mean of each class, so that there is something to learn."""

    def __init__(self, stage: _Stage, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        means = torch.randn(_CLASSES, 3, 1, 1, generator=generator)
        self.labels = torch.randint(_CLASSES, (count,), generator=generator)
        noise = torch.randn(count, 3, stage.pixels, stage.pixels, generator=generator)
        self.inputs = means[self.labels] + noise

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.labels[index]


def _images(stage: _Stage) -> _Images:
    return _Images(stage, (8 if stage.pixels < 224 else 2) * stage.per_worker * _WORKERS)


class _Loop:
    """The platform's loop with one optimizer."""

    def __init__(
        self, membership: Membership, stage: _Stage, optimizer: dict[str, Any], generation: int
    ) -> None:
        self.run = TrainingRun(
            _recipe(optimizer, stage.per_worker * membership.world_size),
            ModelConfig(name=stage.model).build(_CLASSES, seed=0),
            wrap_dataset(_images(stage)),
            PythonConfig(),
            Membership(membership.store, membership.rank, membership.world_size, generation),
        )

    def steps(self) -> Iterator[None]:
        """One `next` is one optimizer step, and the fetch of the next one's samples."""
        for batch in self.run:
            yield
            outputs = self.run.model(batch.inputs)
            self.run.backward(F.cross_entropy(outputs, batch.targets, reduction="none"), outputs)


def _recipe(optimizer: dict[str, Any], batch: int) -> Recipe:
    return load_recipe(
        {
            "stop": {"steps": 10**6},
            "data": {"kind": "python"},
            "batch": {"kind": "fixed", "global_batch": batch},
            "lr_rule": {"kind": "none"},
            "optimizer": optimizer,
            "schedule": {"kind": "constant"},
            "statistics": {"every": 10**9},
            "reducer": {"kind": "ring"},
            "checkpoint": {"every": "0 epochs"},
            "report": {"evaluate_every": "0 epochs"},
        }
    )


def _library_steps(membership: Membership, stage: _Stage) -> Iterator[None]:
    """What a person would write with kfac-pytorch: DDP, its preconditioner, SGD.

    It can't take gradients in channels-last layout, so the model keeps torch's default.
    """
    store = PrefixStore("library", membership.store)
    dist.init_process_group(
        "gloo", store=store, rank=membership.rank, world_size=membership.world_size
    )
    config = ModelConfig(name=stage.model, channels_last=False)
    model = DistributedDataParallel(config.build(_CLASSES, seed=0))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    preconditioner = import_module("kfac.preconditioner").KFACPreconditioner(
        model,
        factor_update_steps=10,
        inv_update_steps=100,
        lr=1e-3,
        compute_method=import_module("kfac.enums").ComputeMethod.INVERSE,
    )
    images = _images(stage)
    while True:
        chosen = torch.randperm(len(images))[: stage.per_worker]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images.inputs[chosen]), images.labels[chosen])
        loss.backward()
        preconditioner.step()
        optimizer.step()
        loss.item()
        yield
