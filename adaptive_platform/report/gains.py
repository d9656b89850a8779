"""What each change of the batch was expected to bring, and what it did bring by the records."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from adaptive_platform.report.run_data import RunData
from adaptive_platform.report.series import Numbers, column, full_steps

__all__ = ["Cost", "DecisionGain", "against_first_batch", "decision_gains"]

_WINDOW = 100
"""Most steps on either side of a change whose time is compared: the machine changes, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What the same progress costs after a change, as a factor on what it cost before.

    Progress is counted in scale-invariant steps, so 0.5 optimizer steps means half as many for the
    same learning by AdaScale's model (arXiv 2007.05105). NaN where it is not known.
    """

    steps: float
    samples: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionGain:
    """One change of the batch."""

    step: int
    """Committed steps when it was decided."""
    old_batch: int
    new_batch: int
    predicted: Cost
    """By the noise and the speed known when it was decided."""
    realised: Cost
    """By the noise and the times measured until the next change."""


def decision_gains(run: RunData) -> list[DecisionGain]:
    """Predicted and realised costs of every decision that changed the batch, in order."""
    changes = run.decisions[
        column(run.decisions, "old_batch") != column(run.decisions, "new_batch")
    ]
    full = full_steps(run.steps)
    full = full[column(full, "skipped") != 1.0]
    step, batch = column(full, "step"), column(full, "global_batch")
    noise, signal = column(full, "noise_trace"), column(full, "signal_sqnorm")
    seconds = column(full, "step_seconds")
    at = column(changes, "step")
    ends = np.append(at[1:], math.inf)
    starts = np.append(-math.inf, at[:-1])
    found = []
    for number, row in enumerate(changes.to_dict("records")):
        old, new = float(row["old_batch"]), float(row["new_batch"])
        after = (step > at[number]) & (step <= ends[number]) & (batch == new)
        before = (step > starts[number]) & (step <= at[number]) & (batch == old)
        realised = _mean(_worth(noise[after], signal[after], old, new))
        slower = _ratio(_mean(seconds[after][:_WINDOW]), _mean(seconds[before][-_WINDOW:]))
        expected = _number(row.get("predicted_gain"))
        found.append(
            DecisionGain(
                step=int(row["step"]),
                old_batch=int(old),
                new_batch=int(new),
                predicted=_cost(expected, new / old, _number(row.get("predicted_slowdown"))),
                realised=_cost(realised, new / old, slower),
            )
        )
    return found


def against_first_batch(run: RunData) -> Cost | None:
    """What the run cost against staying at its first batch, by the noise measured on the way.

    Seconds compare with the mean time of a step at that batch. None where the batch never moved, or
    no noise was measured after it did.
    """
    full = full_steps(run.steps)
    full = full[column(full, "skipped") != 1.0]
    batch, seconds = column(full, "global_batch"), column(full, "step_seconds")
    if not len(batch) or (batch == batch[0]).all():
        return None
    first = batch[0]
    worth = np.array(
        [
            1.0 if now == first else _worth_of(noise, signal, first, now)
            for now, noise, signal in zip(
                batch, column(full, "noise_trace"), column(full, "signal_sqnorm"), strict=True
            )
        ]
    )
    known = np.isfinite(worth)
    if not known[batch != first].any():
        return None
    needed = float(worth[known].sum())
    at_first = seconds[known & (batch == first)]
    return Cost(
        steps=float(known.sum()) / needed,
        samples=float(batch[known].sum()) / (first * needed),
        # The first step of all also pays for start-up.
        seconds=_ratio(float(np.nansum(seconds[known])), _mean(at_first[1:]) * needed),
    )


def _cost(gain: float, growth: float, slowdown: float) -> Cost:
    return Cost(steps=1.0 / gain, samples=growth / gain, seconds=slowdown / gain)


def _worth(noise: Numbers, signal: Numbers, old: float, new: float) -> Numbers:
    return np.array([_worth_of(s, g, old, new) for s, g in zip(noise, signal, strict=True)])


def _worth_of(noise: float, signal: float, old: float, new: float) -> float:
    """AdaScale gain of a step at `new` over one at `old`; NaN where noise was not measured."""
    if not (math.isfinite(noise) and math.isfinite(signal)):
        return math.nan
    noise, signal = max(noise, 0.0), max(signal, 0.0)
    below = noise / new + signal
    return (noise / old + signal) / below if below > 0.0 else math.nan


def _mean(values: Numbers) -> float:
    values = values[np.isfinite(values)]
    return float(values.mean()) if len(values) else math.nan


def _ratio(over: float, under: float) -> float:
    return over / under if under > 0.0 else math.nan


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan
