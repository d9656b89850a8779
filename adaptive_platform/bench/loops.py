"""Loops that `bench overhead` holds side by side: bare DDP, others' estimators around it, and ours.

Each is a generator; one `next` is one whole optimizer step on the same work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from adaptive_platform.collectives import Membership
from adaptive_platform.data import PythonConfig, wrap_dataset
from adaptive_platform.models import ModelConfig
from adaptive_platform.recipe import load_recipe
from adaptive_platform.training.observer import Observer
from adaptive_platform.training.run import TrainingRun

__all__ = ["OURS", "PER_WORKER", "RARELY", "THEIRS", "WORKERS", "bare_loop", "missing", "our_loop"]

WORKERS = 2
PER_WORKER = 32
RARELY = 10
"""Steps from one GSNR to the next."""
_CLASSES = 10

OURS: dict[str, dict[str, Any]] = {
    "loop": {"statistics": {"every": 10**9}},
    "statistics": {"lr_rule": {"kind": "adascale"}, "statistics": {"layers": False}},
    "layers": {"lr_rule": {"kind": "adascale"}},
    "vr": {"lr_rule": {"kind": "adascale"}, "vr": {"every": RARELY}},
}
"""Loops of ours and what each changes in the recipe."""

_OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=1e-4),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, weight_decay=1e-4),
}


def _fairscale(network: nn.Module, optimizer: Optimizer) -> Any:
    return import_module("fairscale.optim").AdaScale(optimizer, world_size=WORKERS)


def _adaptdl(network: nn.Module, optimizer: Optimizer) -> Optimizer:
    """AdaptDL's estimator and AdaScale rule around DDP, without its data loader and checkpoints."""
    noise = import_module("adaptdl.torch.gradient_noise_scale")
    rules = import_module("adaptdl.torch.scaling_rules")
    adam = isinstance(optimizer, torch.optim.AdamW)
    kind = noise.AdamGradientNoiseScale if adam else noise.GradientNoiseScale
    network.gns = kind(network, optimizer, num_replicas=WORKERS)
    rule = rules.AdamScale() if adam else rules.AdaScale()
    rule.initialize(network, optimizer, patch_optimizer=True)
    return optimizer


THEIRS: dict[str, Callable[[nn.Module, Optimizer], Any]] = {
    "fairscale": _fairscale,
    "adaptdl": _adaptdl,
}
"""Estimators of others, where they are installed; each takes a DDP module and its optimizer."""

_MODULES = {"fairscale": "fairscale.optim", "adaptdl": "adaptdl.torch.scaling_rules"}


def missing(name: str) -> str | None:
    """Why one of `THEIRS` can't run here; None where it can."""
    try:
        import_module(_MODULES[name])
    except Exception as error:  # Old packages fail in many ways; all mean the same here.
        return f"{name}: not measured ({type(error).__name__}: {error})"
    return None


def bare_loop(
    membership: Membership, model: str, optimizer_kind: str, theirs: str | None = None
) -> Iterator[None]:
    """What a person would write: DDP, batches sliced from tensors in memory.

    Args:
        membership: This process; the default group exists.
        model: torchvision model.
        optimizer_kind: `sgd` or `adamw`.
        theirs: One of `THEIRS` to put around it.
    """
    network: Any = nn.parallel.DistributedDataParallel(_network(model))
    optimizer: Any = _OPTIMIZERS[optimizer_kind](network.parameters())
    if theirs is not None:
        optimizer = THEIRS[theirs](network, optimizer)
    inputs, targets = _images(8 * PER_WORKER)
    while True:
        chosen = torch.randperm(len(inputs))[:PER_WORKER]
        batch = inputs[chosen].contiguous(memory_format=torch.channels_last)
        optimizer.zero_grad()
        loss = F.cross_entropy(network(batch), targets[chosen])
        loss.backward()
        optimizer.step()
        loss.item()
        yield


def our_loop(
    membership: Membership,
    model: str,
    optimizer_kind: str,
    arm: str,
    generation: int,
    observer: Observer | None = None,
) -> Iterator[None]:
    """The platform's loop on the same work.

    Args:
        membership: This process; each loop makes a group of its own.
        model: torchvision model.
        optimizer_kind: Kind of the recipe's optimizer.
        arm: One of `OURS`.
        generation: Number of the group, different for each loop.
        observer: Hears of every step on worker 0.
    """
    content: dict[str, Any] = {
        "stop": {"epochs": 100000},
        "data": {"kind": "python"},
        "batch": {"kind": "fixed", "global_batch": PER_WORKER * WORKERS},
        "lr_rule": {"kind": "none"},
        "optimizer": {"kind": "sgd", "lr": 0.01, "momentum": 0.9},
        "schedule": {"kind": "cosine"},
        "reducer": {"kind": "ring"},
        "checkpoint": {"every": "0 epochs"},
        "report": {"evaluate_every": "0 epochs"},
    }
    if optimizer_kind != "sgd":
        content["optimizer"] = {"kind": optimizer_kind, "lr": 1e-4, "weight_decay": 1e-4}
    run = TrainingRun(
        load_recipe(content | OURS[arm]),
        _network(model),
        wrap_dataset(_InMemory()),
        PythonConfig(),
        Membership(membership.store, membership.rank, membership.world_size, generation),
        observer=observer,
    )
    for batch in run:
        # Here the step before has been concluded and the data of the next one is there.
        yield
        outputs = run.model(batch.inputs)
        run.backward(F.cross_entropy(outputs, batch.targets, reduction="none"), outputs)


def _network(model: str) -> nn.Module:
    return ModelConfig(name=model).build(_CLASSES, seed=0)


def _images(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, 3, 32, 32, generator=generator)
    return inputs, torch.randint(_CLASSES, (count,), generator=generator)


class _InMemory(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __init__(self) -> None:
        self._inputs, self._targets = _images(8 * PER_WORKER * WORKERS)

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._inputs[index], self._targets[index]
