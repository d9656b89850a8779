"""The search space of a sweep: which values each recipe field may take, and under which conditions.

A space is an ordered mapping from recipe fields to dimensions. Drawing goes through it from top to
bottom; a dimension with `when` is drawn only where the fields it names have the values it names.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Protocol

import numpy as np
from pydantic import Field, model_validator

from adaptive_platform.settings import Variant, union_of

__all__ = [
    "AnyDimension",
    "Choice",
    "Chooser",
    "Dimension",
    "IntRange",
    "LogUniform",
    "RandomChooser",
    "Uniform",
    "check_space",
    "draw",
    "grid",
]

Value = bool | int | float | str | None
"""A value of a recipe field; durations are written as in recipes."""


class Chooser(Protocol):
    """Picks values: at random, or with what a search algorithm has learned."""

    def choose(self, name: str, values: tuple[Any, ...]) -> Any:
        """One of `values`."""

    def real(self, name: str, low: float, high: float, *, log: bool) -> float:
        """A number in [low, high]."""

    def integer(self, name: str, low: int, high: int, *, log: bool) -> int:
        """A whole number in [low, high], both ends included."""


class Dimension(Variant):
    """Values that one recipe field may take."""

    when: dict[str, Value | tuple[Value, ...]] = Field(default={})
    """Other fields of the space and the value, or list of values, that each must have for this one
    to be drawn. Fields named here stand further up in the file."""

    @abstractmethod
    def pick(self, name: str, chooser: Chooser) -> Any:
        """A value of this dimension."""

    def inside(self, value: Any) -> Any:
        """`value`, moved to the nearest one that the dimension holds."""
        return value


class Choice(Dimension):
    """One of a list."""

    kind: Literal["choice"] = "choice"
    values: Annotated[tuple[Value, ...], Field(min_length=1)]
    """What may be chosen."""

    def pick(self, name: str, chooser: Chooser) -> Any:
        """See `Dimension.pick`."""
        return chooser.choose(name, self.values)

    def inside(self, value: Any) -> Any:
        """See `Dimension.inside`: the nearest number; anything else must be one of the values."""
        if value in self.values:
            return value
        numbers = [v for v in self.values if isinstance(v, (int, float))]
        return min(numbers, key=lambda known: abs(known - value))


class _Range(Dimension):
    low: float
    """Smallest value."""
    high: float
    """Largest value."""

    @model_validator(mode="after")
    def _ordered(self) -> _Range:
        if not self.low < self.high:
            raise ValueError(f"low must be below high, not {self.low:g} and {self.high:g}")
        return self

    def inside(self, value: Any) -> Any:
        """See `Dimension.inside`."""
        return min(max(value, self.low), self.high)


class Uniform(_Range):
    """A number; all equally likely."""

    kind: Literal["uniform"] = "uniform"

    def pick(self, name: str, chooser: Chooser) -> float:
        """See `Dimension.pick`."""
        return chooser.real(name, self.low, self.high, log=False)


class LogUniform(_Range):
    """A number; all orders of magnitude equally likely."""

    kind: Literal["log_uniform"] = "log_uniform"
    low: Annotated[float, Field(gt=0)]
    """Smallest value, above 0."""

    def pick(self, name: str, chooser: Chooser) -> float:
        """See `Dimension.pick`."""
        return chooser.real(name, self.low, self.high, log=True)


class IntRange(Dimension):
    """A whole number."""

    kind: Literal["int"] = "int"
    low: int
    """Smallest value."""
    high: int
    """Largest value, included."""
    log: bool = False
    """All orders of magnitude equally likely, rather than all values."""

    @model_validator(mode="after")
    def _ordered(self) -> IntRange:
        if not self.low < self.high:
            raise ValueError(f"low must be below high, not {self.low} and {self.high}")
        if self.log and self.low < 1:
            raise ValueError(f"with log, low must be at least 1, not {self.low}")
        return self

    def pick(self, name: str, chooser: Chooser) -> int:
        """See `Dimension.pick`."""
        return chooser.integer(name, self.low, self.high, log=self.log)

    def inside(self, value: Any) -> int:
        """See `Dimension.inside`."""
        return min(max(round(value), self.low), self.high)


AnyDimension = union_of(
    Dimension,  # type: ignore[type-abstract]
    lambda cls: not cls.__name__.startswith("_"),
)

Space = Mapping[str, Dimension]


class RandomChooser:
    """Picks at random.

    Args:
        generator: Where randomness comes from; equal generators pick alike.
    """

    def __init__(self, generator: np.random.Generator) -> None:
        self._generator = generator

    def choose(self, name: str, values: tuple[Any, ...]) -> Any:
        """See `Chooser.choose`."""
        return values[int(self._generator.integers(len(values)))]

    def real(self, name: str, low: float, high: float, *, log: bool) -> float:
        """See `Chooser.real`."""
        if log:
            drawn = math.exp(self._generator.uniform(math.log(low), math.log(high)))
            return min(max(drawn, low), high)
        return float(self._generator.uniform(low, high))

    def integer(self, name: str, low: int, high: int, *, log: bool) -> int:
        """See `Chooser.integer`."""
        if log:
            drawn = math.floor(math.exp(self._generator.uniform(math.log(low), math.log(high + 1))))
            return min(max(drawn, low), high)
        return int(self._generator.integers(low, high + 1))


def draw(space: Space, chooser: Chooser) -> dict[str, Any]:
    """One value for each field of the space whose conditions hold, in the order of the space."""
    drawn: dict[str, Any] = {}
    for name, dimension in space.items():
        if _holds(dimension, drawn):
            drawn[name] = dimension.pick(name, chooser)
    return drawn


def grid(space: Space) -> list[dict[str, Any]]:
    """All combinations of a space of choices; the last field moves fastest.

    Raises:
        ValueError: A dimension holds more than a list of values.
    """
    for name, dimension in space.items():
        if not isinstance(dimension, Choice):
            raise ValueError(
                f"space.{name}.kind = {dimension.kind}: a grid goes through every value; must be "
                "choice, or use searcher.kind=random."
            )
    return list(_combinations(list(space.items()), {}))


def _combinations(
    left: list[tuple[str, Dimension]], chosen: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    if not left:
        yield dict(chosen)
        return
    (name, dimension), rest = left[0], left[1:]
    if not _holds(dimension, chosen):
        yield from _combinations(rest, chosen)
        return
    assert isinstance(dimension, Choice)
    for value in dimension.values:
        yield from _combinations(rest, {**chosen, name: value})


def check_space(space: Space) -> None:
    """Refuse conditions that could never be met as they are meant.

    Raises:
        ValueError: A condition names a field that does not stand above, or a value it never takes.
    """
    above: dict[str, Dimension] = {}
    for name, dimension in space.items():
        for other, wanted in dimension.when.items():
            if other not in above:
                known = ", ".join(above) or "none"
                raise ValueError(
                    f"space.{name}.when names {other}, which is no field of the space above it "
                    f"(above: {known})"
                )
            parent = above[other]
            odd = [
                value
                for value in _as_tuple(wanted)
                if isinstance(parent, Choice) and value not in parent.values
            ]
            if odd:
                values = ", ".join(map(str, getattr(parent, "values", ())))
                raise ValueError(
                    f"space.{name}.when.{other} = {odd[0]}: it is never chosen; must be one of "
                    f"{values}"
                )
        above[name] = dimension


def _holds(dimension: Dimension, drawn: Mapping[str, Any]) -> bool:
    return all(
        name in drawn and drawn[name] in _as_tuple(wanted)
        for name, wanted in dimension.when.items()
    )


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
