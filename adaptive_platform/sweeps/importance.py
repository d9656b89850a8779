"""Which of the drawn fields mattered for the score, as far as so few trials can tell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["MIN_TRIALS", "importance"]

MIN_TRIALS = 6
"""Scored trials below which nothing is said."""


def importance(fields: Sequence[dict[str, Any]], scores: Sequence[float]) -> dict[str, float]:
    """Share of the variance between scores that a random forest ascribes to each field.

    Impurity importance (Breiman 2001), as in fANOVA-style sweep reports: it ranks, and is biased
    towards fields with many values. Numbers spanning orders of magnitude count by their logarithm;
    other values are one column per value; a field that was not drawn for a trial is a value of its
    own.

    Args:
        fields: Drawn fields per trial.
        scores: One score per trial, finite.

    Returns:
        Field to share in [0, 1], largest first; empty with fewer than `MIN_TRIALS` trials, where
        nothing was varied, or where all scores are equal.
    """
    names = list(dict.fromkeys(name for drawn in fields for name in drawn))
    columns, owners = [], []
    for name in names:
        for column in _encoded([drawn.get(name) for drawn in fields]):
            columns.append(column)
            owners.append(name)
    if len(scores) < MIN_TRIALS or not columns or np.ptp(scores) == 0.0:
        return {}
    from sklearn.ensemble import RandomForestRegressor

    forest = RandomForestRegressor(n_estimators=200, random_state=0, min_samples_leaf=2)
    forest.fit(np.column_stack(columns), np.asarray(scores))
    found = dict.fromkeys(names, 0.0)
    for owner, share in zip(owners, forest.feature_importances_, strict=True):
        found[owner] += float(share)
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _encoded(values: list[Any]) -> list[np.ndarray[Any, Any]]:
    """Columns of numbers for one field; none where it has one value only."""
    if len({str(value) for value in values}) < 2:
        return []
    known = [value for value in values if value is not None]
    if all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in known):
        numbers = np.array([np.nan if value is None else float(value) for value in values])
        low, high = np.nanmin(numbers), np.nanmax(numbers)
        if low > 0 and high / low >= 10.0:
            numbers = np.log(numbers)
        drawn = np.isfinite(numbers)
        centre = numbers[drawn].mean()
        columns = [np.where(drawn, numbers, centre)] if len({*numbers[drawn]}) > 1 else []
        return columns if drawn.all() else [*columns, drawn.astype(float)]
    return [
        np.array([float(str(value) == level) for value in values])
        for level in sorted({str(value) for value in values})
    ]
