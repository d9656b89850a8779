"""What must hold after a run in trouble: its samples, weights and records against a calm one's."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.nn import functional as F

from adaptive_platform.bench.faults import Network, Points
from adaptive_platform.bench.stage import workers
from adaptive_platform.checkpoints.store import CheckpointStore, read_state
from adaptive_platform.collectives import Membership
from adaptive_platform.data import PythonConfig, wrap_dataset
from adaptive_platform.recipe import Recipe, load_recipe
from adaptive_platform.training.run import TrainingRun

__all__ = [
    "CHECKPOINT_STEPS",
    "TIMEOUT_SECONDS",
    "Standing",
    "hold_against_calm",
    "longest_gap",
    "next_step",
    "recipe",
    "until_full",
]

CHECKPOINT_STEPS = 20
TIMEOUT_SECONDS = 8
"""Of operations between workers. A peer that stands still is missed then, and asked for 5 s."""
_BATCH = 24
_TOLERANCE = 1e-4
_WEIGHT_DECAY = 0.01
"""Without it, what rounding makes of the order of sums grows to 5 % of the weights in 7,000 steps.
With it, differences are forgotten within about 500 steps, those of mistakes as well."""
"""Of weights after some hundred steps whose sums were made in another order."""
_AFTER_SECONDS = 20.0
"""A gap that begins later after an event is not its doing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What came of the invariants."""

    steps: int
    """Committed steps."""
    samples_lost: int
    samples_repeated: int
    weights_alike: bool
    """To the bit on all workers before each step, and up to rounding those of a calm run."""
    strays: int
    """Processes of workers that are left."""
    wrong: tuple[str, ...]
    """Everything else that is not as it should be, in words."""


def recipe(run_dir: str | None, workers: tuple[int, int], *words: str) -> Recipe:
    """A fixed batch, so that two runs are comparable step by step."""
    content = {
        "name": "chaos",
        "out": run_dir,
        "workers": workers,
        "stop": {"steps": 10**6},
        "data": {"kind": "python"},
        "batch": {"kind": "fixed", "global_batch": _BATCH},
        "lr_rule": {"kind": "none"},
        "optimizer": {"kind": "sgd", "lr": 0.02, "momentum": 0.9, "weight_decay": _WEIGHT_DECAY},
        "schedule": {"kind": "constant"},
        "reducer": {"kind": "torus", "timeout_seconds": TIMEOUT_SECONDS},
        "checkpoint": {"every": f"{CHECKPOINT_STEPS} steps"},
        "report": {"record_sample_ids": True, "html": False, "evaluate_every": "0 epochs"},
        "max_failures": 20,
    }
    return load_recipe(content, list(words))


def hold_against_calm(
    run_dir: Path,
    notes: Mapping[str, Sequence[str]],
    *,
    repeated: int,
    unreadable: int,
    leave_seconds: float = 20.0,
) -> Standing:
    """Hold a run that has ended against one of a single worker without trouble.

    Args:
        run_dir: Of the run.
        notes: By process, checksums of the weights before each of its passes.
        repeated: Most steps that were made again from a checkpoint, perhaps by other workers.
        unreadable: Samples that may be missing, as they were made so.
        leave_seconds: Until the processes of a run that is over have to have ended.
    """
    rows = pd.read_parquet(run_dir / "steps").sort_values("time").reset_index(drop=True)
    committed = rows[~rows.skipped]
    wrong = []
    if committed.step.tolist() != list(range(1, len(committed) + 1)):
        wrong.append("the records of steps have gaps or repeats")
    got = [sorted(i for share in row for i in share) for row in rows.sample_ids]
    calm = _Calm(len(committed))
    skipped = set(rows.index[rows.skipped])
    planned, _ = calm.run(skipped, {})
    lost = repeats = 0
    refused: dict[int, set[int]] = {}
    for number, (mine, theirs) in enumerate(zip(got, planned, strict=False)):
        missing = Counter(theirs) - Counter(mine)
        lost += sum(missing.values())
        repeats += sum((Counter(mine) - Counter(theirs)).values())
        for sample in missing:
            before = sum(sample in row for row in planned[:number])
            refused.setdefault(sample, set()).add(before)
    if len(got) != len(planned):
        wrong.append(f"{len(got)} steps were recorded, a calm run takes {len(planned)}")
    if lost > unreadable:  # then a calm run can't be told to leave out the same
        refused = {}
    _, weights = calm.run(skipped, {s: frozenset(times) for s, times in refused.items()})
    store = CheckpointStore(str(run_dir))
    newest = store.saved()[-1]
    if newest.step != len(committed):
        wrong.append(f"the last checkpoint is of step {newest.step} of {len(committed)}")
    saved = read_state(store.read(newest))["model"]
    alike = all(
        torch.allclose(saved[name], value, rtol=_TOLERANCE, atol=_TOLERANCE)
        for name, value in weights.items()
    )
    if not alike:
        wrong.append("the weights are not those of a calm run")
    # Each committed step begins from weights of its own: more checksums than steps are a worker
    # that differs from the others.
    seen = {each for said in notes.values() for each in said}
    if not len(committed) <= len(seen) <= len(committed) + repeated:
        wrong.append(f"workers held {len(seen)} different weights in {len(committed)} steps")
        alike = False
    left = _left_over(leave_seconds)
    if left:
        wrong.append(f"{left} worker processes are left")
    if lost > unreadable or repeats:
        wrong.append(f"{lost} samples were lost, {repeats} came twice")
    return Standing(
        steps=len(committed),
        samples_lost=lost,
        samples_repeated=repeats,
        weights_alike=alike,
        strays=left,
        wrong=tuple(wrong),
    )


def next_step(run_dir: Path, when: float) -> float:
    """Seconds from an event to the step that ends the longest gap after it.

    A step that was all but done when a worker was lost may still be committed.
    """
    times = pd.read_parquet(run_dir / "steps").time.sort_values().to_numpy()
    gaps = [
        (end - begin, begin, end)
        for begin, end in itertools.pairwise(times)
        if end > when and begin < when + _AFTER_SECONDS
    ]
    _, begin, end = max(gaps)
    return float(end - max(begin, when))


def longest_gap(run_dir: Path, when: Sequence[float]) -> list[float]:
    """The longest time without a step that begins soon after each event, in seconds."""
    times = pd.read_parquet(run_dir / "steps").time.sort_values().to_numpy()
    gaps = times[1:] - times[:-1]
    found = []
    for event in when:
        after = (times[1:] > event) & (times[:-1] < event + _AFTER_SECONDS)
        found.append(float(gaps[after].max()) if after.any() else math.inf)
    return found


def until_full(run_dir: Path, when: float, workers: int) -> float:
    """Seconds until a number of workers is reached again; NaN where it never changed, or stayed."""
    rows = pd.read_parquet(run_dir / "steps").sort_values("time")
    after = rows[rows.time > when]
    low = after[after.world_size < workers]
    if low.empty:
        return math.nan
    back = after[(after.time > low.time.iloc[0]) & (after.world_size >= workers)]
    return float(back.time.iloc[0] - when) if len(back) else math.nan


def _left_over(seconds: float) -> int:
    deadline = time.monotonic() + seconds
    while (left := len(workers())) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


class _Calm:
    """A run of one worker, in this process.

    Args:
        steps: Committed steps that it takes.
    """

    def __init__(self, steps: int) -> None:
        self._recipe = recipe(None, (1, 1), f"stop.steps={steps}")

    def run(
        self, skipped: set[int], refused: Mapping[int, frozenset[int]]
    ) -> tuple[list[list[int]], dict[str, Tensor]]:
        """Sample ids of each step, dropped ones included, and the weights at the end.

        Args:
            skipped: Numbers of the steps, from 0, whose loss is NaN.
            refused: Readings of samples that fail; see `faults.Points`.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._recipe.seed)
            model = Network()
        ids: list[list[int]] = []
        run = TrainingRun(
            self._recipe,
            model,
            wrap_dataset(Points(refused=refused)),
            PythonConfig(),
            Membership(HashStore(), 0, 1),
        )
        with run:
            position = None
            for batch in run:
                if run.progress != position:
                    position = run.progress
                    ids.append([])
                ids[-1] += batch.ids.tolist()
                outputs = model(batch.inputs)
                losses = F.cross_entropy(outputs, batch.targets, reduction="none")
                run.backward(losses * math.nan if len(ids) - 1 in skipped else losses, outputs)
        return [sorted(each) for each in ids], dict(model.state_dict())
