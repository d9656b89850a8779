"""The baselines of `bench recovery`, as their own tutorials write them: torchrun's and Ray Train's.

    torchrun --nproc-per-node=2 --max-restarts=100 recovery_loops.py FOLDER

Both save every ten steps and go on from there when their workers are started again.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from adaptive_platform.bench.faults import Network, Orders, PacedLoss, Points

__all__ = ["CHECKPOINT_STEPS", "GLOBAL_BATCH", "WORKERS", "ray_train", "torchrun"]

CHECKPOINT_STEPS = 10
GLOBAL_BATCH = 24
WORKERS = 2
_FILE = "snapshot.pt"


def _note(orders: Orders, rank: int, step: int) -> None:
    orders.note(f"{rank}:{step}:{time.time()}")


def _made() -> tuple[nn.Module, PacedLoss]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return Network(), PacedLoss()


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def torchrun(folder: str) -> None:
    """One worker: DDP with a snapshot, after PyTorch's tutorial on fault-tolerant training.

    Source: pytorch.org/tutorials/beginner/ddp_series_fault_tolerance.html.
    """
    torch.distributed.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    model, loss = _made()
    optimizer = _optimizer(model)
    snapshot = Path(folder, _FILE)
    step = 0
    if snapshot.exists():
        saved = torch.load(snapshot, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    wrapped = nn.parallel.DistributedDataParallel(model)
    points = Points()
    sampler: DistributedSampler[Any] = DistributedSampler(points)
    loader = DataLoader(points, batch_size=GLOBAL_BATCH // WORKERS, sampler=sampler)
    orders = Orders(folder)
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        epoch += 1
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss(wrapped(inputs), targets).mean().backward()
            optimizer.step()
            step += 1
            _note(orders, rank, step)
            if rank == 0 and step % CHECKPOINT_STEPS == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                aside = snapshot.with_suffix(".new")
                torch.save(state | {"step": step}, aside)
                aside.replace(snapshot)


def ray_train(config: dict[str, Any]) -> None:
    """One worker: `prepare_model` and reported checkpoints, after Ray Train's guides.

    Source: docs.ray.io/en/latest/train/getting-started-pytorch.html and .../train/user-guides/
    fault-tolerance.html.
    """
    import ray.train
    import ray.train.torch

    rank = ray.train.get_context().get_world_rank()
    model, loss = _made()
    wrapped = ray.train.torch.prepare_model(model)
    optimizer = _optimizer(wrapped)
    step = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder, _FILE), weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    plain = DataLoader(Points(), batch_size=GLOBAL_BATCH // WORKERS, shuffle=True)
    loader = ray.train.torch.prepare_data_loader(plain)
    orders = Orders(config["folder"])
    epoch = 0
    while True:
        loader.sampler.set_epoch(epoch)
        epoch += 1
        for inputs, targets in loader:
            optimizer.zero_grad()
            losses = loss(wrapped(inputs), targets)
            losses.mean().backward()
            optimizer.step()
            step += 1
            _note(orders, rank, step)
            if step % CHECKPOINT_STEPS:
                continue
            metrics = {"step": step}
            with tempfile.TemporaryDirectory() as folder:
                if rank != 0:
                    ray.train.report(metrics)
                    continue
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state | {"step": step}, Path(folder, _FILE))
                ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))


if __name__ == "__main__":
    torchrun(sys.argv[1])
