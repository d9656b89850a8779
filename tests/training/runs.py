"""Whole runs without Ray: each worker a thread, real Gloo groups, records kept in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from ranks import as_threads
from torch import Tensor, nn
from torch.distributed import HashStore
from torch.nn import functional as F

from adaptive_platform.checkpoints.store import CheckpointStore
from adaptive_platform.collectives import Membership
from adaptive_platform.data import PythonConfig, wrap_dataset
from adaptive_platform.gradients.precision import LossScale
from adaptive_platform.recipe import Recipe, load_recipe
from adaptive_platform.report.records import DecisionRecord, EvalRecord, EventRecord, StepRecord
from adaptive_platform.training.held_records import Record
from adaptive_platform.training.run import TrainingRun


class Points(torch.utils.data.Dataset):
    """Numbered random rows with labels; the number is the index."""

    def __init__(self, size: int, features: int = 6, classes: int = 3, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(size, features, generator=generator)
        self.labels = torch.randint(classes, (size,), generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.inputs[index], int(self.labels[index])


@dataclass
class Watcher:
    """Keeps what it is told; asks to stop once `stop_after` steps were seen."""

    steps: list[StepRecord] = field(default_factory=list)
    decisions: list[DecisionRecord] = field(default_factory=list)
    evaluations: list[EvalRecord] = field(default_factory=list)
    events: list[EventRecord] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    """Steps that were known whenever records had to be made durable."""
    leads: list[int] = field(default_factory=list)
    """Steps at which this worker became the first; -1 where another one did."""
    advised: list[int] = field(default_factory=list)
    stop: Callable[[], bool] = lambda: False
    durable: Callable[[], int] = lambda: 0

    def step(self, record: StepRecord, fraction_done: float) -> None:
        self.steps.append(record)

    def decision(self, record: DecisionRecord) -> None:
        self.decisions.append(record)

    def evaluation(self, record: EvalRecord) -> None:
        self.evaluations.append(record)

    def event(self, record: EventRecord) -> None:
        self.events.append(record)

    def keep(self) -> None:
        self.kept.append(len(self.steps))

    def lead(self, records: Sequence[Record], step: int) -> None:
        """As with a journal: what the one before wrote of the same steps is written again."""
        self.leads.append(step)
        for record in records:
            kind = {StepRecord: self.steps, DecisionRecord: self.decisions}
            kind.get(type(record), self.evaluations).append(record)

    def advice(self, workers: int) -> None:
        self.advised.append(workers)

    def follow(self) -> None:
        self.leads.append(-1)

    def durable_step(self) -> int:
        return self.durable()

    def stop_requested(self) -> bool:
        return self.stop()


@dataclass
class Outcome:
    """One worker's run when it was over."""

    run: TrainingRun
    watcher: Watcher
    weights: dict[str, Tensor]
    history: list[dict[str, Tensor]]
    """Weights after each step, where asked for."""

    @property
    def lrs(self) -> list[float]:
        return [record.lr for record in self.watcher.steps]

    @property
    def ids(self) -> list[list[int]]:
        """Sample ids per step, over all workers, in rank order."""
        return [
            [i for share in record.sample_ids or [] for i in share] for record in self.watcher.steps
        ]


def recipe(*overrides: str, **content: Any) -> Recipe:
    """A small recipe for data from Python; `overrides` as on the command line."""
    base: dict[str, Any] = {
        "name": "test",
        "seed": 3,
        "stop": {"epochs": 2},
        "data": {"kind": "python"},
        "batch": {"kind": "fixed", "global_batch": 8},
        "lr_rule": {"kind": "none"},
        "optimizer": {"kind": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.0},
        "schedule": {"kind": "constant"},
        "reducer": {"kind": "ring", "timeout_seconds": 20},
        "report": {"record_sample_ids": True},
    }
    return load_recipe(base | content, list(overrides))


def linear_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))


def train(
    config: Recipe,
    *,
    world_size: int = 1,
    data: Any = None,
    eval_data: Any = None,
    classes: tuple[str, ...] = (),
    model: Callable[[], nn.Module] = linear_net,
    run_dir: Path | None = None,
    must_resume: bool = False,
    loss: Callable[[TrainingRun, Tensor, Tensor], Tensor] | None = None,
    stop_after: int | None = None,
    keep_history: bool = False,
    loss_scale: float | None = None,
    seconds_of: Callable[[int], float] | None = None,
    nodes: tuple[str, ...] | None = None,
) -> list[Outcome]:
    """Train with `world_size` workers to the end; one outcome per rank.

    `loss` may be called by the loop's own way to make adversaries. With `seconds_of` a pass over b
    samples takes `seconds_of(b)` by the run's clock, and nothing else takes any time.
    """
    store = HashStore()
    torch.manual_seed(0)
    models = [model() for _ in range(world_size)]

    def work(rank: int) -> Outcome:
        watcher = Watcher()
        now = [0.0]
        source = wrap_dataset(data if data is not None else Points(40), eval_data, classes or None)
        run = TrainingRun(
            config,
            models[rank],
            source,
            config.data if isinstance(config.data, PythonConfig) else PythonConfig(),
            Membership(store, rank, world_size, 0, nodes),
            store=CheckpointStore(str(run_dir)) if run_dir is not None and rank == 0 else None,
            observer=watcher,
            must_resume=must_resume,
            makes_adversaries=True,
            **({"clock": lambda: now[0]} if seconds_of else {}),
        )
        if loss_scale is not None:
            run.state.loss_scale = LossScale(value=loss_scale, growth_steps=0)
        begun = run.progress.step
        if stop_after is not None and rank == world_size - 1:
            watcher.stop = lambda: run.progress.step - begun >= stop_after - 1
        history: list[dict[str, Tensor]] = []
        step = run.progress
        try:
            for batch in run:
                if keep_history and run.progress != step:
                    history.append(_weights(run.model))
                    step = run.progress
                now[0] += seconds_of(len(batch)) if seconds_of else 0.0
                with run.memory_guard():
                    batch = run.with_adversaries(batch, sample_loss)
                    with run.autocast():
                        outputs = run.model(batch.inputs)
                    if loss is not None:
                        losses = loss(run, outputs, batch.targets)
                    else:
                        losses = sample_loss(outputs, batch.targets)
                    run.backward(losses, outputs)
            if keep_history:
                history.append(_weights(run.model))
        finally:
            run.close()
        return Outcome(run, watcher, _weights(run.model), history)

    return as_threads(world_size, work)


def sample_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor], tolerance: float) -> None:
    """Weights agree; a tolerance of 0 means bit for bit."""
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=tolerance, atol=tolerance)
