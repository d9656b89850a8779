"""The one number that Tune's schedulers and searchers compare trials by: finite, more is better.

They order and average what they are given. A NaN compares as false with everything, so a diverged
trial would pass each of ASHA's rungs, be left out of the median and never take over weights; an
infinity turns averages and interpolated quantiles into NaN.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["MODE", "SCORE", "WORST", "lost", "score_of"]

SCORE = "score"
"""Key in what a trial reports; its loss and accuracy stand beside it as they were measured."""
MODE = "max"
"""Which end of the score is good, whatever the sweep's metric."""
WORST = -1e30
"""Below every real score, and small enough that a million of them can be added up."""


def score_of(metric: str, scores: Mapping[str, Any]) -> float:
    """What a trial is compared by.

    Args:
        metric: The sweep's metric, `accuracy` or `loss`.
        scores: Of one evaluation; either may be missing.

    Returns:
        The accuracy, or the loss with its sign changed; `WORST` where the metric is missing or
        where `lost` says so.
    """
    value = scores.get(metric)
    if value is None or lost(scores):
        return WORST
    return max(WORST, -float(value) if metric == "loss" else float(value))


def lost(scores: Mapping[str, Any]) -> str:
    """Which score is not finite, as words for people; empty where all that are there are.

    An accuracy beside a loss that is not finite is that of a model whose outputs mean nothing.
    """
    for name, value in scores.items():
        if value is not None and not math.isfinite(value):
            return f"held-out {name} of {value}"
    return ""
