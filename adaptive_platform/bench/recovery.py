"""`bench recovery`: from a killed worker to the next step, against Ray Train and torchrun."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from adaptive_platform.bench.rows import Row
from adaptive_platform.bench.stage import adopt_orphans, end_descendants
from adaptive_platform.errors import RunFailedError

__all__ = ["recovery", "rows_of"]

_SIDES = ("live", "ray-train", "restart", "torchrun")
_KILLS = 3
_FEW_KILLS = 1
_QUICK_SIDES = ("live", "torchrun")
_SIDE_SECONDS = 300.0

Times = dict[str, dict[str, list[float]]]
"""By side and figure, one value per kill."""


def recovery(*, quick: bool, say: Callable[[str], None] = lambda text: None) -> list[Row]:
    """Kill one of two workers a few times on each side; the same small model everywhere.

    Args:
        quick: One kill, and the sides that start fast.
        say: Hears how it goes.
    """
    adopt_orphans()
    found: Times = {}
    for side in _QUICK_SIDES if quick else _SIDES:
        try:
            found[side] = _measure(side, _FEW_KILLS if quick else _KILLS)
        except RunFailedError as error:
            say(f"{side}: {error}")
            continue
        for figure, values in found[side].items():
            say(f"{side}: {figure} {', '.join(f'{value:.2f}' for value in values)}")
    return rows_of(found)


def _measure(side: str, kills: int) -> dict[str, list[float]]:
    folder = Path(tempfile.mkdtemp(prefix="recovery-"))
    words = [sys.executable, "-m", "adaptive_platform.bench.recovery_sides"]
    words += [side, str(kills), str(folder)]
    try:
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            timeout=_SIDE_SECONDS,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
    except subprocess.TimeoutExpired:
        raise RunFailedError(f"not over within {_SIDE_SECONDS:.0f} s") from None
    finally:
        end_descendants()
        shutil.rmtree(folder, ignore_errors=True)
    for line in done.stdout.splitlines():
        if line.startswith("finding "):
            found: dict[str, list[float]] = json.loads(line.removeprefix("finding "))
            return found
        if line.startswith("failed "):
            raise RunFailedError(line.removeprefix("failed "))
    raise RunFailedError((done.stderr.strip().splitlines() or ["it said nothing"])[-1])


_PAIRS = (
    ("live", "torchrun"),
    ("live", "ray-train"),
    ("restart", "torchrun"),
    ("restart", "ray-train"),
)


def rows_of(found: Times) -> list[Row]:
    """Ours against each baseline, and what has none."""
    rows = []
    for ours, theirs in _PAIRS:
        if ours in found and theirs in found:
            rows.append(_row(f"{ours} over {theirs}: kill to next step", found, ours, theirs))
    for side, figure, unit in (
        ("live", "replacement in", "s"),
        ("live", "steps repeated", "steps"),
        ("ray-train", "steps repeated", "steps"),
        ("torchrun", "steps repeated", "steps"),
    ):
        values = found.get(side, {}).get(figure)
        if values:
            rows.append(
                Row(
                    bench="recovery",
                    case=f"{side}: {figure}",
                    value=statistics.median(values),
                    unit=unit,
                    baseline=None,
                    ratio=None,
                    repeats=len(values),
                )
            )
    return rows


def _row(case: str, found: Times, ours: str, theirs: str) -> Row:
    mine, other = (found[side]["next step"] for side in (ours, theirs))
    value, baseline = statistics.median(mine), statistics.median(other)
    return Row(
        bench="recovery",
        case=case,
        value=value,
        unit="s",
        baseline=baseline,
        ratio=value / baseline,
        repeats=min(len(mine), len(other)),
    )
