"""Where a run stands, in units that do not mix: samples, epochs, steps, scale-invariant steps."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

__all__ = ["Duration", "Progress", "Unit"]


class Unit(str, Enum):
    """What a duration counts."""

    EPOCHS = "epochs"
    """Passes over the training set; fractions are meant."""
    SAMPLES = "samples"
    STEPS = "steps"
    """Committed optimizer steps. They change their meaning when the batch moves."""
    SCALE_INVARIANT_STEPS = "scale_invariant_steps"
    """Sum of gains: steps that the base batch would have needed (AdaScale, arXiv 2007.05105)."""


_TEXT = re.compile(r"^\s*(?P<value>\d+(\.\d*)?([eE][+-]?\d+)?)\s*(?P<unit>[a-z_]*)\s*$")
_ALIASES = {"": "epochs", "epoch": "epochs", "ep": "epochs", "step": "steps", "sample": "samples"}


@dataclass(frozen=True, slots=True)
class Duration:
    """A length of training, such as `5 epochs` or `100 steps`. A bare number means epochs."""

    value: float
    unit: Unit = Unit.EPOCHS

    @classmethod
    def parse(cls, given: object) -> Duration:
        """Read `Duration`, a number of epochs, or text such as `0.5 epochs`.

        Raises:
            ValueError: Not a length, negative, or of an unknown unit.
        """
        if isinstance(given, Duration):
            return given
        if isinstance(given, bool) or not isinstance(given, (int, float, str)):
            raise ValueError("write a number of epochs, or number and unit, such as `100 steps`")
        match = _TEXT.match(str(given))
        name = _ALIASES.get(match["unit"], match["unit"]) if match else ""
        if match is None or name not in {unit.value for unit in Unit}:
            units = ", ".join(unit.value for unit in Unit)
            raise ValueError(f"write a number >= 0 and one of {units}, such as `100 steps`")
        value = float(match["value"])
        if math.isinf(value) or 0.0 < value < 1e-6:
            raise ValueError("write a number between 1e-6 and 1e300, or 0")
        return cls(value, Unit(name))

    def __str__(self) -> str:
        # All digits: this is also how recipes are written, and a milestone must not move.
        value = float(self.value)
        shown = str(int(value)) if value.is_integer() and value < 1e15 else repr(value)
        return f"{shown} {self.unit.value}"

    def __sub__(self, other: Duration) -> Duration:
        if other.unit is not self.unit:
            raise TypeError(f"{self} - {other}: the units differ")
        return Duration(self.value - other.value, self.unit)

    @classmethod
    def __get_pydantic_core_schema__(cls, _: Any, __: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls.parse, serialization=core_schema.plain_serializer_function_ser_schema(str)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Position in the data and amount of training done; moves only when a step commits.

    `(epoch, cursor)` is the position: the next step takes `order[cursor : cursor + B]` of its
    epoch. The other counters say how much was learned, which a skipped step does not add to.
    """

    dataset_size: int
    """Samples in one epoch."""
    epoch: int = 0
    cursor: int = 0
    """Samples of this epoch's order that are behind us, in [0, dataset_size]."""
    step: int = 0
    """Committed optimizer steps."""
    samples: int = 0
    """Samples that entered a committed step."""
    scale_invariant_steps: float = 0.0
    skipped_steps: int = 0
    """Steps that all workers agreed to drop (a non-finite value)."""

    @property
    def epochs(self) -> float:
        """Fractional epochs of training done: samples / dataset size."""
        return self.samples / self.dataset_size

    @property
    def position(self) -> float:
        """Fractional epochs of the data order that lie behind: epoch + cursor / dataset size."""
        return self.epoch + self.cursor / self.dataset_size

    def elapsed(self, unit: Unit) -> float:
        """Training done so far, counted in `unit`."""
        if unit is Unit.EPOCHS:
            return self.epochs
        if unit is Unit.SAMPLES:
            return float(self.samples)
        if unit is Unit.STEPS:
            return float(self.step)
        return self.scale_invariant_steps

    def committed(self, consumed: int, trained: int, gain: float) -> Progress:
        """After a step that counted.

        Args:
            consumed: Positions of the global order that the step took.
            trained: Samples that entered the gradient; fewer where broken ones were left out.
            gain: AdaScale gain of the step, its scale-invariant length.
        """
        return replace(
            self._moved(consumed),
            step=self.step + 1,
            samples=self.samples + trained,
            scale_invariant_steps=self.scale_invariant_steps + gain,
        )

    def skipped(self, consumed: int) -> Progress:
        """After a step that all workers dropped: its samples are behind us, nothing was learned."""
        return replace(self._moved(consumed), skipped_steps=self.skipped_steps + 1)

    def _moved(self, consumed: int) -> Progress:
        cursor = self.cursor + consumed
        if cursor > self.dataset_size:
            raise AssertionError(f"cursor {cursor} beyond the epoch's {self.dataset_size} samples")
        if cursor == self.dataset_size:
            return replace(self, epoch=self.epoch + 1, cursor=0)
        return replace(self, cursor=cursor)

    def state_dict(self) -> dict[str, int | float]:
        """Plain numbers for a checkpoint."""
        return asdict(self)
