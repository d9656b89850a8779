"""Rows of a benchmark's result, as a table for people or one JSON object a line for programs."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

__all__ = ["Row", "median_interval", "paired", "print_rows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One case."""

    bench: str
    case: str
    value: float
    """Ours."""
    unit: str
    baseline: float | None
    """What it is held against; None where a figure stands alone."""
    ratio: float | None
    """Ours / baseline; for times and sizes smaller is better."""
    repeats: int
    """Alternating blocks behind the figures."""


def paired(
    bench: str, case: str, unit: str, ours: Sequence[float], baseline: Sequence[float]
) -> Row:
    """A row from alternating blocks: medians of each side, and the median of the pairs' ratios.

    Pairs share the machine's mood, so their ratio strays less than the ratio of the medians.
    """
    ratios = [a / b for a, b in zip(ours, baseline, strict=True)]
    return Row(
        bench=bench,
        case=case,
        value=statistics.median(ours),
        unit=unit,
        baseline=statistics.median(baseline),
        ratio=statistics.median(ratios),
        repeats=len(ratios),
    )


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Bounds of the median that hold with at least that confidence, whatever the distribution.

    The k-th smallest and k-th largest value, k by the binomial distribution of how many lie below
    the median. The extremes where there are too few values for the confidence.
    """
    ordered, count = sorted(values), len(values)
    below, outside = 0.0, 0
    for k in range(count // 2):
        below += math.comb(count, k) / 2.0**count
        if 2.0 * below > 1.0 - confidence:
            break
        outside = k + 1
    at = max(outside - 1, 0)
    return ordered[at], ordered[count - 1 - at]


def print_rows(rows: Iterable[Row], *, as_json: bool, console: Console) -> None:
    """Print all rows, one JSON object a line or as a table."""
    if as_json:
        for row in rows:
            print(json.dumps(asdict(row)))
        return
    table = Table("case", "ours", "baseline", "unit", "ratio", "repeats", box=None)
    for row in rows:
        table.add_row(
            row.case,
            f"{row.value:.4g}",
            "" if row.baseline is None else f"{row.baseline:.4g}",
            row.unit,
            "" if row.ratio is None else f"{row.ratio:.3f}",
            str(row.repeats),
        )
    console.print(table)
