"""The throughput model, fitted online to measured step times (Pollux, OSDI 2021)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from adaptive_platform.summary import ThroughputModel

__all__ = ["StepTiming", "ThroughputEstimator"]

_FIELDS = (
    "alpha_grad",
    "beta_grad",
    "alpha_local",
    "beta_local",
    "alpha_node",
    "beta_node",
    "gamma",
)
_LEAST = 1e-8
"""Least coefficient, as a share of the median step: the logarithm of zero has no gradient."""
_NODE_PENALTY = 1.1
"""Reductions over nodes, never seen, are taken to be at least this much slower."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTiming:
    """One timed step, or a mean of several that were split alike."""

    world_size: int
    num_nodes: int
    microbatch: int
    """Samples of a forward and backward pass on one worker."""
    accumulation: int
    """Micro-batches per worker and step."""
    step_seconds: float
    """Seconds of the whole step."""
    gradient_seconds: float | None = None
    """Seconds of one forward and backward pass, without the reduction. None: not measured."""


class ThroughputEstimator:
    """Keeps the mean times of every split it has seen and fits the model on demand.

    Means are geometric, since the fit compares logarithms; a stall weighs little. Not promised: a
    reduction term for a number of workers or nodes that was never tried is only a prior.
    """

    def __init__(self) -> None:
        # Split -> [steps, sum of log step seconds, passes, sum of log gradient seconds].
        self._seen: dict[tuple[int, int, int, int], list[float]] = {}

    def update(self, timing: StepTiming) -> None:
        """Let one timing in; a time that is not finite and above 0 is left out."""
        if not 0.0 < timing.step_seconds < math.inf:
            return
        key = (timing.world_size, timing.num_nodes, timing.microbatch, timing.accumulation)
        sums = self._seen.setdefault(key, [0.0, 0.0, 0.0, 0.0])
        sums[0] += 1.0
        sums[1] += math.log(timing.step_seconds)
        if timing.gradient_seconds is not None and 0.0 < timing.gradient_seconds < math.inf:
            sums[2] += 1.0
            sums[3] += math.log(timing.gradient_seconds)

    def timings(self) -> list[StepTiming]:
        """The mean times of each split, in the order in which they were first seen."""
        return [
            StepTiming(
                world_size=key[0],
                num_nodes=key[1],
                microbatch=key[2],
                accumulation=key[3],
                step_seconds=math.exp(log_steps / steps),
                gradient_seconds=math.exp(log_passes / passes) if passes else None,
            )
            for key, (steps, log_steps, passes, log_passes) in self._seen.items()
        ]

    def fit(self) -> ThroughputModel | None:
        """The model that fits all splits best, with its error; None before the first timing."""
        timings = self.timings()
        return _fit(timings) if timings else None

    def state_dict(self) -> dict[str, list[list[float]]]:
        """Plain numbers for a checkpoint."""
        return {"seen": [[*key, *sums] for key, sums in self._seen.items()]}

    def load_state_dict(self, state: Mapping[str, list[list[float]]]) -> None:
        """Continue from `state_dict`, bit for bit."""
        self._seen = {
            (int(row[0]), int(row[1]), int(row[2]), int(row[3])): [float(v) for v in row[4:]]
            for row in state["seen"]
        }


def _fit(timings: list[StepTiming]) -> ThroughputModel:
    from scipy.optimize import minimize

    # In units of the median step, so that one start and one step of the solver fit all models.
    unit = float(np.median([timing.step_seconds for timing in timings]))
    start, bounds = _start_and_bounds(timings, unit)

    def objective(values: npt.NDArray[np.float64]) -> float:
        model = _model(values, 1.0)
        steps = [_log_ratio(model, timing, unit) for timing in timings]
        passes = [
            math.log((model.alpha_grad + model.beta_grad * t.microbatch) * unit / seconds)
            for t in timings
            if (seconds := t.gradient_seconds) is not None
        ]
        rough = (model.beta_node / model.alpha_node) ** 2 + (
            model.beta_local / model.alpha_local
        ) ** 2
        return _rms(steps) + _rms(passes) + 1e-3 * (model.gamma - 1.0) ** 2 + 1e-2 * rough

    best: Any = minimize(objective, start, method="L-BFGS-B", bounds=bounds)
    values = np.asarray(best.x, dtype=np.float64)
    if not any(timing.num_nodes > 1 for timing in timings):
        values[4:6] = np.maximum(values[4:6], _NODE_PENALTY * values[2:4])
    model = _model(values, unit)
    errors = [abs(math.exp(_log_ratio(model, timing, 1.0)) - 1.0) for timing in timings]
    return _model(values, unit, fit_error=sum(errors) / len(errors))


def _start_and_bounds(
    timings: list[StepTiming], unit: float
) -> tuple[npt.NDArray[np.float64], list[tuple[float, float]]]:
    """Where the search starts; what the timings can't tell is pinned, as published."""
    largest = max(timing.microbatch for timing in timings)
    start = np.array([0.1, 0.1 / largest, 0.1, 0.01, 0.1, 0.01, 1.001])
    bounds = [(_LEAST, math.inf)] * 6 + [(1.0, 10.0)]
    bounds[1] = (_LEAST / largest, math.inf)
    if len({timing.microbatch for timing in timings}) == 1:
        # One size can't tell a constant from a slope: half of the time to each.
        passes = [t.gradient_seconds or t.step_seconds / t.accumulation for t in timings]
        _pin(0, 0.5 * float(np.mean(passes)) / unit, start, bounds)
    one_node = [timing.world_size for timing in timings if timing.num_nodes == 1]
    several = [timing.world_size for timing in timings if timing.num_nodes > 1]
    for seen, alpha in ((one_node, 2), (several, 4)):
        if max(seen, default=1) < 2:
            _pin(alpha, _LEAST, start, bounds)
        if max(seen, default=1) < 3:
            _pin(alpha + 1, 0.0, start, bounds)
    return start, bounds


def _pin(
    index: int, value: float, start: npt.NDArray[np.float64], bounds: list[tuple[float, float]]
) -> None:
    start[index] = value
    bounds[index] = (value, value)


def _model(values: npt.NDArray[np.float64], unit: float, fit_error: float = 0.0) -> ThroughputModel:
    seconds = [float(value) * unit for value in values[:6]]
    return ThroughputModel(
        **dict(zip(_FIELDS, [*seconds, float(values[6])], strict=True)), fit_error=fit_error
    )


def _log_ratio(model: ThroughputModel, timing: StepTiming, unit: float) -> float:
    predicted = model.step_seconds(
        timing.world_size, timing.num_nodes, timing.microbatch, timing.accumulation
    )
    return math.log(predicted * unit / timing.step_seconds)


def _rms(values: list[float]) -> float:
    return math.sqrt(sum(value * value for value in values) / len(values)) if values else 0.0
