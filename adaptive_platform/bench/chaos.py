"""Runs in trouble: each scenario ends with its invariants checked, as a table of event and time."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.nn import functional as F

from adaptive_platform.bench.rows import Row
from adaptive_platform.bench.trouble import (
    AddNode,
    Drain,
    Freeze,
    Kill,
    KillNode,
    Moment,
    Stage,
    strays,
)
from adaptive_platform.checkpoints.store import CheckpointStore, read_state
from adaptive_platform.cluster.launch import launch
from adaptive_platform.cluster.mailbox import Message
from adaptive_platform.collectives import Membership
from adaptive_platform.data import PythonConfig, wrap_dataset
from adaptive_platform.errors import RunFailedError
from adaptive_platform.recipe import Recipe, load_recipe
from adaptive_platform.training.run import TrainingRun

__all__ = ["Outcome", "Scenario", "chaos", "scenarios"]

_SAMPLES = 960
_FEATURES = 16
_CLASSES = 4
_BATCH = 24
_PACE_SECONDS = 0.03
"""A step is made to take at least this long, so that a run is still under way when trouble ends."""
_CALM_STEPS = 40
"""Steps after the last trouble."""
_PATIENCE_SECONDS = 120.0
_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One run in trouble."""

    name: str
    workers: tuple[int, int]
    moments: list[Moment]
    gap_seconds: float
    """Longest gap between two committed steps that is allowed after an event."""
    workers_after: int
    """Workers at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of it. Any breach of an invariant is an error instead."""

    scenario: Scenario
    gaps: list[float]
    """Longest gap between committed steps in the ten seconds after each event, in seconds."""
    full_seconds: list[float]
    """From each event until the run had its number of workers again; NaN where it did not."""
    steps: int
    events: list[str]


def scenarios(*, quick: bool) -> list[Scenario]:
    """The table of trouble; on two nodes of two CPUs, of which runs take three workers."""
    both = (1, 3)
    first = Scenario(
        name="a worker is killed",
        workers=both,
        moments=[Moment(30, Kill(1), 3)],
        gap_seconds=1.5,
        workers_after=3,
    )
    if quick:
        return [first]
    return [
        first,
        Scenario(
            name="the first worker is killed",
            workers=both,
            moments=[Moment(30, Kill(0), 3)],
            gap_seconds=1.5,
            workers_after=3,
        ),
        Scenario(
            name="a worker stands still for 20 s",
            workers=both,
            moments=[Moment(30, Freeze(2, 20.0), 3)],
            gap_seconds=15.0,
            workers_after=3,
        ),
        Scenario(
            name="a node drains",
            workers=both,
            moments=[Moment(30, Drain(1), 3)],
            gap_seconds=1.0,
            workers_after=2,
        ),
        Scenario(
            name="a node is killed, another one is added",
            workers=both,
            moments=[Moment(30, KillNode(1), 2), Moment(60, AddNode(), 2)],
            gap_seconds=15.0,
            workers_after=3,
        ),
    ]


def chaos(
    *, quick: bool, case: str = "", say: Callable[[str], None] = lambda text: None
) -> list[Row]:
    """Run the scenarios one after the other on a cluster of several nodes on this machine.

    Args:
        quick: The first one only.
        case: Only those whose name has this in it.
        say: Hears how it goes.

    Raises:
        RunFailedError: An invariant was broken; the message says which.
    """
    torch.set_num_threads(1)
    stage = Stage(nodes=2)
    rows, broken = [], []
    try:
        for scenario in (s for s in scenarios(quick=quick) if case in s.name):
            try:
                outcome = play(stage, scenario)
            except RunFailedError as error:
                broken.append(str(error))
                say(broken[-1])
                continue
            say(f"{scenario.name}: {outcome.steps} steps; " + "; ".join(outcome.events))
            rows += rows_of(outcome)
    finally:
        stage.close()
    if broken:
        raise RunFailedError("; ".join(broken))
    return rows


def rows_of(outcome: Outcome) -> list[Row]:
    """Times of one scenario; the baseline is what is allowed."""
    allowed = outcome.scenario.gap_seconds
    found = []
    for number, (gap, full) in enumerate(zip(outcome.gaps, outcome.full_seconds, strict=True)):
        name = outcome.scenario.name
        if len(outcome.gaps) > 1:
            name += f", event {number + 1}"
        found.append(_row(f"{name}: longest gap between steps", gap, allowed))
        if full == full:
            found.append(_row(f"{name}: all workers there", full, None))
    return found


def _row(case: str, value: float, allowed: float | None) -> Row:
    ratio = None if allowed is None else value / allowed
    return Row(
        bench="chaos",
        case=case,
        value=value,
        unit="s",
        baseline=allowed,
        ratio=ratio,
        repeats=1,
    )


class Points(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Numbered random rows."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self._inputs = torch.randn(_SAMPLES, _FEATURES, generator=generator)
        self._targets = torch.randint(_CLASSES, (_SAMPLES,), generator=generator)

    def __len__(self) -> int:
        return _SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._inputs[index], self._targets[index]


def network() -> nn.Module:
    """A small network without batch norm, so that the result does not depend on the workers."""
    return nn.Sequential(nn.Linear(_FEATURES, 32), nn.Tanh(), nn.Linear(32, _CLASSES))


def paced_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy per sample, after a pause."""
    time.sleep(_PACE_SECONDS)
    return F.cross_entropy(outputs, targets, reduction="none")


def recipe(run_dir: str | None, workers: tuple[int, int], steps: int = 10**6) -> Recipe:
    """A fixed batch, so that two runs are comparable step by step."""
    return load_recipe(
        {
            "name": "chaos",
            "out": run_dir,
            "workers": workers,
            "stop": {"steps": steps},
            "data": {"kind": "python"},
            "batch": {"kind": "fixed", "global_batch": _BATCH},
            "lr_rule": {"kind": "none"},
            "optimizer": {"kind": "sgd", "lr": 0.05, "momentum": 0.9},
            "schedule": {"kind": "constant"},
            "reducer": {"kind": "torus", "timeout_seconds": 10},
            "checkpoint": {"every": "20 steps"},
            "report": {
                "record_sample_ids": True,
                "html": False,
                "evaluate_every": "0 epochs",
            },
            "max_failures": 10,
        }
    )


@dataclass(slots=True)
class _Watch:
    """Collects what the workers say, and answers whether the run may stop."""

    stage: Stage
    stop: bool = False
    step: int = 0
    seen: dict[int, float] = field(default_factory=dict)
    """When each number of workers was seen last."""

    def __call__(self, messages: list[Message]) -> bool:
        for kind, fields, _ in messages:
            if kind == "step":
                self.step = fields["step"]
            elif kind == "members":
                self.stage.pids, self.stage.machines = fields["pids"], fields["nodes"]
        return self.stop


def play(stage: Stage, scenario: Scenario) -> Outcome:
    """Run one scenario and check its invariants.

    Raises:
        RunFailedError: One of them is broken.
    """
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    try:
        return _play(stage, scenario, folder / "run")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _play(stage: Stage, scenario: Scenario, run_dir: Path) -> Outcome:
    watch = _Watch(stage)
    stage.pids = ()
    results: list[Any] = []

    def run() -> None:
        config = recipe(str(run_dir), scenario.workers)
        try:
            results.append(
                launch(config, watch=watch, model=network, train_data=Points(), loss=paced_loss)
            )
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def until(condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not condition():
            if results:
                raise RunFailedError(f"{scenario.name}: the run ended early: {results[0]}")
            if time.monotonic() > deadline:
                raise RunFailedError(f"{scenario.name}: {what} did not happen (step {watch.step})")
            time.sleep(0.05)

    for moment in scenario.moments:
        reached, there = moment.step, moment.workers
        until(
            lambda s=reached, w=there: watch.step >= s and len(stage.pids) >= w,  # type: ignore[misc]
            f"step {moment.step} with {moment.workers} workers",
        )
        moment.done.append(time.time())
        moment.trouble.act(stage)
        time.sleep(2.0)
    until(lambda: len(stage.pids) == scenario.workers_after, f"{scenario.workers_after} workers")
    last = watch.step + _CALM_STEPS
    until(lambda: watch.step >= last, f"{_CALM_STEPS} calm steps")
    watch.stop = True
    thread.join(_PATIENCE_SECONDS)
    if not results:
        raise RunFailedError(f"{scenario.name}: the run does not end")
    if isinstance(results[0], BaseException) or results[0].status != "interrupted":
        raise RunFailedError(f"{scenario.name}: {results[0]}")
    return check(scenario, run_dir)


def check(scenario: Scenario, run_dir: Path) -> Outcome:
    """Hold a run against one without trouble, and take its times.

    Raises:
        RunFailedError: Samples, weights, records or processes are not as they should be.
    """
    steps = pd.read_parquet(run_dir / "steps").sort_values("step")
    wrong = []
    if steps.step.tolist() != list(range(1, len(steps) + 1)):
        wrong.append("the records have gaps or repeats")
    ids, weights = undisturbed(len(steps))
    if [sorted(i for share in row for i in share) for row in steps.sample_ids] != ids:
        wrong.append("samples were lost, repeated or out of their order")
    store = CheckpointStore(str(run_dir))
    newest = store.saved()[-1]
    if newest.step != len(steps):
        wrong.append(f"the last checkpoint is of step {newest.step} of {len(steps)}")
    saved = read_state(store.read(newest))["model"]
    for name, value in weights.items():
        if not torch.allclose(saved[name], value, rtol=_TOLERANCE, atol=_TOLERANCE):
            wrong.append(f"{name} is not what a run without trouble has")
    deadline = time.monotonic() + 20.0
    while strays() and time.monotonic() < deadline:
        time.sleep(0.5)
    if strays():
        wrong.append(f"{strays()} worker processes are left")
    if wrong:
        raise RunFailedError(f"{scenario.name}: " + "; ".join(wrong))
    events = pd.read_parquet(run_dir / "events")
    told = events[events.kind.isin(["lost", "left", "joined", "regrouped", "resume", "warning"])]
    began = scenario.moments[0].done[0]
    return Outcome(
        scenario=scenario,
        gaps=[_gap(steps, moment.done[0]) for moment in scenario.moments],
        full_seconds=[_full(steps, moment) for moment in scenario.moments],
        steps=len(steps),
        events=[
            f"{event.time - began:+.2f} s {event.kind}: {event.text}"
            for event in told.itertuples()
            if event.time >= began - 1.0
        ],
    )


def _gap(steps: pd.DataFrame, when: float) -> float:
    """The longest time without a committed step that begins within ten seconds of an event."""
    times = steps.time.to_numpy()
    gaps = times[1:] - times[:-1]
    after = (times[1:] > when) & (times[:-1] < when + 10.0)
    return float(gaps[after].max())


def _full(steps: pd.DataFrame, moment: Moment) -> float:
    """Until the number of workers was seen to come back; NaN where it never went, or stayed low."""
    after = steps[steps.time > moment.done[0]]
    low = after[after.world_size < moment.workers]
    if low.empty:
        return float("nan")
    back = after[(after.time > low.time.iloc[0]) & (after.world_size >= moment.workers)]
    return float(back.time.iloc[0] - moment.done[0]) if len(back) else float("nan")


def undisturbed(steps: int) -> tuple[list[list[int]], dict[str, Tensor]]:
    """Sample ids of each step and the weights at the end of a run of one worker."""
    config = recipe(None, (1, 1), steps)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = network()
    ids: list[list[int]] = []
    run = TrainingRun(
        config,
        model,
        wrap_dataset(Points()),
        PythonConfig(),
        Membership(HashStore(), 0, 1),
        must_resume=False,
    )
    with run:
        position = None
        for batch in run:
            if run.progress != position:
                position = run.progress
                ids.append([])
            ids[-1] += batch.ids.tolist()
            outputs = model(batch.inputs)
            run.backward(F.cross_entropy(outputs, batch.targets, reduction="none"), outputs)
    return [sorted(each) for each in ids], dict(model.state_dict())
