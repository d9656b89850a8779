"""From the tables of a run to the few thousand numbers that a figure draws."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from adaptive_platform.report.run_data import RunData

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "AXES",
    "AXIS_TITLES",
    "COLOURS",
    "axes_of",
    "buckets",
    "colour",
    "column",
    "extremes",
    "full_steps",
    "json_numbers",
    "smooth",
    "staircase",
    "time_parts",
    "time_shares",
]

Numbers: TypeAlias = NDArray[np.float64]

AXES = ("samples", "steps", "minutes")
"""What the horizontal axis may count."""
AXIS_TITLES = {"samples": "samples seen", "steps": "steps", "minutes": "minutes"}
COLOURS = (
    "#2f6db3", "#d1652b", "#3b8f5a", "#8a5fb0", "#b8860b", "#c0486f", "#2a9d9d", "#6b6b6b",
)  # fmt: skip
"""One colour per run, told apart also with colour-weak eyes by the first three."""


def colour(run: int) -> str:
    """Colour of the run with this number, from 0."""
    return COLOURS[run % len(COLOURS)]


def column(frame: pd.DataFrame, name: str) -> Numbers:
    """A column as floats; NaN where it is missing, None, infinite or not a number."""
    import pandas as pd

    if name not in frame.columns:
        return np.full(len(frame), np.nan)
    values = pd.to_numeric(frame[name], errors="coerce").to_numpy(dtype=np.float64, na_value=np.nan)
    return np.where(np.isfinite(values), values, np.nan)


def full_steps(steps: pd.DataFrame) -> pd.DataFrame:
    """The steps without the last one of an epoch where it took what was left over.

    Its size says how the data divides, not which batch was in force.
    """
    epoch, batch = column(steps, "epoch"), column(steps, "global_batch")
    follows = np.concatenate([[False], epoch[1:] == epoch[:-1]])[: len(steps)]
    last = np.concatenate([epoch[1:] != epoch[:-1], [True]])[: len(steps)]
    odd = np.concatenate([[False], batch[1:] != batch[:-1]])[: len(steps)]
    return steps[~(follows & last & odd)]


def axes_of(run: RunData, frame: pd.DataFrame) -> dict[str, Numbers]:
    """Horizontal positions of the rows of one of the run's tables, in each unit of `AXES`.

    Minutes are wall time since the first step began, pauses between attempts included.
    """
    step = column(frame, "step")
    positions = {"samples": column(frame, "samples_seen"), "steps": step}
    if np.isnan(positions["samples"]).all() and len(run.steps):
        positions["samples"] = _at_steps(run, step, column(run.steps, "samples_seen"))
    times, start = column(frame, "time"), _start(run)
    positions["minutes"] = (times - start) / 60.0
    return positions


def _start(run: RunData) -> float:
    times, seconds = column(run.steps, "time"), column(run.steps, "step_seconds")
    if not len(times):
        return float("nan")
    first = seconds[0] if np.isfinite(seconds[0]) else 0.0
    return float(times[0] - first)


def _at_steps(run: RunData, step: Numbers, values: Numbers) -> Numbers:
    known = column(run.steps, "step")
    return np.interp(step, known, values) if len(known) else np.full(len(step), np.nan)


def extremes(values: Numbers, limit: int) -> NDArray[np.int64]:
    """Indices of at most `limit` points that keep the shape: least and greatest of each stretch.

    The first and the last point are always kept, and no NaN is chosen where a stretch holds a
    number.
    """
    size = len(values)
    if size <= limit:
        return np.arange(size)
    chosen = {0, size - 1}
    edges = np.linspace(0, size, max(1, (limit - 2) // 2) + 1).astype(int)
    for begin, end in itertools.pairwise(edges):
        stretch = values[begin:end]
        if np.isnan(stretch).all():
            chosen.add(int(begin))
            continue
        chosen.add(int(begin + np.nanargmin(stretch)))
        chosen.add(int(begin + np.nanargmax(stretch)))
    return np.array(sorted(chosen), dtype=np.int64)


def staircase(values: Numbers, limit: int) -> NDArray[np.int64]:
    """Indices of the last point of each level of a piecewise constant series, and its ends.

    A row tells what held up to its position, so a level is drawn backwards from its last row.
    Falls back to `extremes` where there are more than `limit` levels.
    """
    size = len(values)
    if size == 0:
        return np.arange(0)
    before, after = values[:-1], values[1:]
    changed = (before != after) & ~(np.isnan(before) & np.isnan(after))
    chosen = np.unique(np.concatenate([[0], np.flatnonzero(changed), [size - 1]]))
    return chosen.astype(np.int64) if len(chosen) <= limit else extremes(values, limit)


def smooth(values: Numbers, half_life: float) -> Numbers:
    """Exponential moving average with its start corrected; NaN neither counts nor spreads.

    Args:
        values: One number per step.
        half_life: Steps after which a value counts half.
    """
    import pandas as pd

    averaged = pd.Series(values).ewm(halflife=half_life, ignore_na=True).mean()
    return np.where(np.isnan(values), np.nan, averaged.to_numpy(dtype=np.float64))


def buckets(weights: Sequence[Numbers], limit: int) -> tuple[NDArray[np.int64], list[Numbers]]:
    """Sums of several series over at most `limit` equal stretches.

    Returns:
        The last index of each stretch, and the sums of each series. NaN counts as 0.
    """
    size = len(weights[0])
    if size == 0:
        return np.arange(0), [np.zeros(0) for _ in weights]
    edges = np.unique(np.linspace(0, size, min(limit, size) + 1).astype(int))
    sums = [np.add.reduceat(np.nan_to_num(series), edges[:-1]) for series in weights]
    return (edges[1:] - 1).astype(np.int64), sums


def time_parts(steps: pd.DataFrame) -> dict[str, Numbers]:
    """Seconds of each step by what they were spent on; they add up to `step_seconds`."""
    named = {
        name: np.nan_to_num(column(steps, f"{name}_seconds"))
        for name in ("data", "reduce", "statistics")
    }
    rest = np.nan_to_num(column(steps, "step_seconds")) - sum(named.values(), np.zeros(len(steps)))
    return {"compute": np.maximum(rest, 0.0), **named}


def time_shares(steps: pd.DataFrame) -> dict[str, float]:
    """Share of the whole step time that each part took; empty where no time was recorded."""
    sums = {name: float(spent.sum()) for name, spent in time_parts(steps).items()}
    total = sum(sums.values())
    return {name: value / total for name, value in sums.items()} if total > 0 else {}


def json_numbers(values: Any, digits: int = 5) -> list[float | None]:
    """Numbers with `digits` significant digits; None where not finite."""
    return [
        float(f"{value:.{digits}g}") if np.isfinite(value) else None
        for value in np.asarray(values, dtype=np.float64)
    ]
