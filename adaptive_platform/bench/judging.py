"""What came of a scenario: its times and its invariants, held against what is allowed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from adaptive_platform.bench.invariants import (
    CHECKPOINT_STEPS,
    hold_against_calm,
    longest_gap,
    until_full,
)
from adaptive_platform.bench.scenarios import Scenario

__all__ = ["Finding", "judge"]

_TOLD = (
    "lost",
    "left",
    "joined",
    "regrouped",
    "resume",
    "warning",
    "skip",
    "broken_sample",
    "straggler",
)
_KEEP_LINES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What came of one scenario."""

    name: str
    event: str
    expected: str
    verdict: str
    """`as expected`, or what was not."""
    gap_seconds: float | None = None
    """Longest gap between committed steps after the events."""
    full_seconds: float | None = None
    """From the first event until all workers were there again."""
    told_after: int | None = None
    """Steps until the event that was to be told."""
    steps: int = 0
    events: int = 0
    steps_repeated: int = 0
    samples_lost: int = 0
    samples_repeated: int = 0
    weights_alike: bool | None = None
    strays: int = 0
    seconds: float = 0.0
    """All of it, the start and the end of the run included."""
    told: tuple[str, ...] = ()
    """What the run said meanwhile, after how many seconds."""

    @property
    def as_expected(self) -> bool:
        """True where nothing was wrong."""
        return self.verdict == "as expected"

    @property
    def was_not_run(self) -> bool:
        """True where this machine does not allow it."""
        return self.verdict.startswith("not run")


def judge(
    scenario: Scenario,
    run_dir: Path,
    notes: Mapping[str, Sequence[str]],
    *,
    done: Sequence[float],
    repeated: int,
    restarts: int,
    began: float,
) -> Finding:
    """Hold what a run left behind against what the scenario allows.

    Args:
        scenario: What was played.
        run_dir: Of the run, which has ended.
        notes: By process, checksums of the weights before each of its passes.
        done: When trouble was made, in seconds since 1970.
        repeated: Steps that came again after a restart.
        restarts: From a checkpoint.
        began: When the scenario began, by the monotonic clock.
    """
    standing = hold_against_calm(
        run_dir,
        notes,
        repeated=restarts * CHECKPOINT_STEPS,
        unreadable=scenario.unreadable,
        leave_seconds=scenario.leave_seconds,
    )
    wrong = list(standing.wrong)
    gap = max(longest_gap(run_dir, done))
    if gap > scenario.gap_seconds:
        wrong.append(f"a gap of {gap:.1f} s")
    full = until_full(run_dir, done[0], scenario.workers[1])
    if scenario.full_seconds is not None and not full <= scenario.full_seconds:
        wrong.append(f"all workers were back after {full:.1f} s")
    if repeated > scenario.repeated:
        wrong.append(f"{repeated} steps were made again")
    events = pd.read_parquet(run_dir / "events").sort_values("time")
    told_after = None
    if scenario.tells:
        told_after = _told_after(run_dir, events, scenario.tells, done[-1])
        if scenario.tells_within is not None and told_after > scenario.tells_within:
            wrong.append(f"`{scenario.tells}` was told after {told_after} steps")
    told = events[events.kind.isin(_TOLD) & (events.time >= done[0] - 1.0)]
    lines = [f"{e.time - done[0]:+.2f} s {e.kind}: {e.text}" for e in told.itertuples()]
    return Finding(
        name=scenario.name,
        event=scenario.event,
        expected=scenario.expected,
        verdict="; ".join(wrong) or "as expected",
        gap_seconds=round(gap, 3),
        full_seconds=round(full, 2) if full == full else None,
        told_after=told_after,
        steps=standing.steps,
        events=len(done),
        steps_repeated=repeated,
        samples_lost=standing.samples_lost,
        samples_repeated=standing.samples_repeated,
        weights_alike=standing.weights_alike,
        strays=standing.strays,
        seconds=round(time.monotonic() - began, 1),
        told=tuple(lines[:_KEEP_LINES]),
    )


def _told_after(run_dir: Path, events: pd.DataFrame, kind: str, when: float) -> int:
    """Steps between a moment and the first event of a kind."""
    first = events[(events.kind == kind) & (events.time >= when)].time.min()
    times = pd.read_parquet(run_dir / "steps").time
    return int(((times > when) & (times < first)).sum())
