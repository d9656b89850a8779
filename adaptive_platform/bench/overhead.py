"""What the loop and its statistics cost over a bare PyTorch DDP loop: time per step and memory."""

from __future__ import annotations

import random
import resource
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import PrefixStore

from adaptive_platform.bench.loops import (
    OURS,
    RARELY,
    THEIRS,
    WORKERS,
    bare_loop,
    missing,
    our_loop,
)
from adaptive_platform.bench.processes import run_group
from adaptive_platform.bench.rows import Row, paired
from adaptive_platform.collectives import Membership
from adaptive_platform.errors import UserError

__all__ = ["CASES", "Measurement", "all_cases", "measure", "overhead", "overhead_rows", "sides_of"]

CASES: dict[str, tuple[str, str]] = {
    "resnet18": ("resnet18", "sgd"),
    "resnet50": ("resnet50", "sgd"),
    "resnet18-adamw": ("resnet18", "adamw"),
}
"""Model and optimizer of each case; `<case>-memory` takes the peak memory of its loops."""

_MEMORY = "-memory"
_SECONDS = 150.0
_QUICK_SECONDS = 15.0
_PAIRS: tuple[tuple[str, str, str, int], ...] = (
    ("loop over bare DDP", "loop", "bare", 1),
    ("norm statistics over bare DDP", "statistics", "bare", 1),
    ("norm statistics over loop", "statistics", "loop", 1),
    ("norm statistics and GSNR of layers over bare DDP", "layers", "bare", 1),
    ("norm statistics and GSNR of layers over loop", "layers", "loop", 1),
    (f"GSNR of elements (VRGD) every {RARELY} steps over bare DDP", "vr", "bare", RARELY),
    (f"GSNR of elements (VRGD) every {RARELY} steps over loop", "vr", "loop", RARELY),
    ("fairscale AdaScale over bare DDP", "fairscale", "bare", 1),
    ("AdaptDL's estimator over bare DDP", "adaptdl", "bare", 1),
)
"""What a row says, its two loops, and the steps of a block: one where every step does the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What one case gave, before anything is divided."""

    case: str
    unit: str
    """`s/step`, `CPU s/step` of one process with all its threads, or `MiB` of one process."""
    values: Mapping[str, Sequence[float]]
    """Of each loop; the same index was measured in the same round of turns."""
    notes: Sequence[str] = field(default=())
    """Loops that could not be measured here, and why."""


def overhead(*, quick: bool, case: str = "") -> tuple[list[Row], list[str]]:
    """Take turns, step by step, between bare DDP, our loop with and without statistics, and others.

    2 workers of one thread, 32 images of 32x32 each, data in memory, fixed batch. `Norm statistics`
    takes the norm of the whole gradient, with `GSNR of layers` also that of each, both at every
    step; `GSNR of elements` refreshes VRGD's ratios besides, in each tenth step. fairscale's
    AdaScale and AdaptDL's estimator run around DDP where they are installed. CPU time is what a
    process used, so it hardly sees other programs on the machine, nor any wait. Memory is the peak
    of a fresh process per loop.

    Args:
        quick: Only ResNet-18's times, to end within a minute.
        case: One of `CASES` or that with `-memory`; all where empty.

    Returns:
        Rows, and lines on what could not be measured.

    Raises:
        UserError: There is no such case.
    """
    names = all_cases()
    if case and case not in names:
        raise UserError(f"--case = {case}: must be one of {', '.join(names)}.")
    chosen = [case] if case else names[:1] if quick else names
    seconds = _QUICK_SECONDS if quick else _SECONDS
    found = [measurement for name in chosen for measurement in measure(name, seconds)]
    rows = [row for measurement in found for row in overhead_rows(measurement)]
    return rows, list(dict.fromkeys(note for m in found for note in m.notes))


def all_cases() -> list[str]:
    """Names of everything that can be measured, times first."""
    return [name + kind for kind in ("", _MEMORY) for name in CASES]


def measure(case: str, seconds: float) -> list[Measurement]:
    """Measure one case: its peak memory, or its wall and CPU times.

    Args:
        case: One of `CASES`, or that with `-memory`.
        seconds: How long loops take turns, from the end of the first round; memory takes as long
            as it takes.
    """
    name = case.removesuffix(_MEMORY)
    model, optimizer = CASES[name]
    theirs = [arm for arm in THEIRS if arm != "fairscale" or optimizer == "sgd"]
    notes = [note for note in map(missing, theirs) if note]
    theirs = [arm for arm in theirs if missing(arm) is None]
    if case.endswith(_MEMORY):
        arms = ["bare", *OURS, *theirs]
        peaks = {
            arm: [max(run_group(WORKERS, _peak_mib, model, optimizer, arm)) for _ in range(2)]
            for arm in arms
        }
        return [Measurement(case=case, unit="MiB", values=peaks, notes=notes)]
    wall, cpu = run_group(WORKERS, _take_turns, model, optimizer, theirs, seconds)[0]
    return [
        Measurement(case=case, unit="s/step", values=wall, notes=notes),
        Measurement(case=case, unit="CPU s/step", values=cpu, notes=notes),
    ]


def overhead_rows(measurement: Measurement) -> list[Row]:
    """Ratios of a measurement; a loop that was not measured has no row."""
    return [
        paired("overhead", f"{measurement.case}: {words}", measurement.unit, ours, baseline)
        for words, (ours, baseline) in sides_of(measurement).items()
    ]


def sides_of(measurement: Measurement) -> dict[str, tuple[list[float], list[float]]]:
    """What each row compares: ours and its baseline, block by block."""
    sides = {}
    for words, ours, baseline, steps in _PAIRS:
        if not {ours, baseline} <= set(measurement.values):
            continue
        block = 1 if measurement.unit == "MiB" else steps
        one, other = (_blocks(measurement.values[arm], block) for arm in (ours, baseline))
        if one:
            sides[words] = one, other
    return sides


def _blocks(values: Sequence[float], block: int) -> list[float]:
    starts = range(0, len(values) - block + 1, block)
    return [statistics.fmean(values[start : start + block]) for start in starts]


def _loop(
    membership: Membership, model: str, optimizer: str, arm: str, generation: int
) -> Iterator[None]:
    if arm in OURS:
        return our_loop(membership, model, optimizer, arm, generation)
    return bare_loop(membership, model, optimizer, None if arm == "bare" else arm)


def _take_turns(
    membership: Membership, model: str, optimizer: str, theirs: list[str], seconds: float
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Wall and CPU seconds of each step of each loop, as rank 0 saw them."""
    _default_group(membership)
    names = ["bare", *OURS, *theirs]
    loops = [
        _loop(membership, model, optimizer, name, generation)
        for generation, name in enumerate(names, start=1)
    ]
    wall: dict[str, list[float]] = {name: [] for name in names}
    cpu: dict[str, list[float]] = {name: [] for name in names}
    go_on = torch.ones(1)
    for loop in loops * 2:  # The first two steps of each set things up.
        next(loop)
    started = time.perf_counter()
    turn = 0
    while go_on.item():
        # Another order in each round: caches and freed memory favour whoever follows a lean loop.
        for index in random.Random(turn).sample(range(len(names)), len(names)):
            dist.barrier()
            begun, used = time.perf_counter(), time.process_time()
            next(loops[index])
            dist.barrier()
            cpu[names[index]].append(time.process_time() - used)
            wall[names[index]].append(time.perf_counter() - begun)
        turn += 1
        go_on.fill_(time.perf_counter() - started < seconds)
        dist.broadcast(go_on, src=0)
    dist.destroy_process_group()
    return wall, cpu


def _peak_mib(membership: Membership, model: str, optimizer: str, arm: str) -> float:
    if arm not in OURS:
        _default_group(membership)
    loop = _loop(membership, model, optimizer, arm, generation=1)
    for _ in range(4):
        next(loop)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _default_group(membership: Membership) -> None:
    store = PrefixStore("bare", membership.store)
    dist.init_process_group(
        "gloo", store=store, rank=membership.rank, world_size=membership.world_size
    )
