"""The run's own speed: rank 0 times its steps, fits the model, and tells the others."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple
from typing import Any

import torch

from adaptive_platform.collectives import Reducer
from adaptive_platform.statistics.throughput import StepTiming, ThroughputEstimator
from adaptive_platform.summary import ThroughputModel

__all__ = ["Speed"]

_FIRST_FITS = 10
_LATER_FITS = 100
"""Steps between two fits, at first and from step 100 on."""
_NUMBERS = 8


class Speed:
    """A throughput model that is the same on all workers, refitted now and then.

    A fit takes rank 0 some milliseconds and all workers one small message. Timing alone costs
    nothing to speak of, so every run keeps its own.
    """

    def __init__(self) -> None:
        self.model: ThroughputModel | None = None
        """What is known now; None before the first fit."""
        self._timings = ThroughputEstimator()
        self._warm = False

    def add(self, timing: StepTiming) -> None:
        """Let a committed step in; the first one of a process pays for start-up and is left out."""
        if self._warm:
            self._timings.update(timing)
        self._warm = True

    def due(self, step: int) -> bool:
        """True after committed step number `step`, counted from 1, where a fit is to be made."""
        return step % (_FIRST_FITS if step < _LATER_FITS else _LATER_FITS) == 0

    def refit(self, reducer: Reducer) -> None:
        """Fit on rank 0 and take its model over. All workers take part."""
        numbers = torch.full((_NUMBERS,), math.nan, dtype=torch.float64)
        if reducer.rank == 0:
            fitted = self._timings.fit()
            if fitted is not None:
                numbers = torch.tensor(astuple(fitted), dtype=torch.float64)
        numbers = numbers.to(reducer.device)
        reducer.broadcast(numbers)
        values = numbers.tolist()
        if not math.isnan(values[0]):
            self.model = _model_of(values)

    def own_model(self) -> ThroughputModel | None:
        """Fitted to this worker's timings alone: for records, as it differs between workers."""
        return self._timings.fit()

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers for a checkpoint; the timings are rank 0's."""
        return {
            "model": list(astuple(self.model)) if self.model else None,
            "timings": self._timings.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.model = _model_of(state["model"]) if state["model"] else None
        self._timings.load_state_dict(state["timings"])


def _model_of(values: list[float]) -> ThroughputModel:
    names = ThroughputModel.__dataclass_fields__
    return ThroughputModel(**dict(zip(names, values, strict=True)))
