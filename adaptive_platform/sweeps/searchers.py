"""Who proposes the next trial: chance, every combination in turn, or Optuna."""

from __future__ import annotations

import importlib.util
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from adaptive_platform.errors import UserError
from adaptive_platform.settings import Variant, union_of
from adaptive_platform.sweeps.space import Dimension, RandomChooser, draw, grid

__all__ = ["AnySearcher", "Grid", "Optuna", "Random", "Searcher"]

DEFAULT_TRIALS = 10


class Searcher(Variant):
    """How the fields of the next trial are chosen."""

    @abstractmethod
    def planned(
        self, space: Mapping[str, Dimension], trials: int | None, seed: int
    ) -> list[dict[str, Any]] | None:
        """The fields of all trials, where they are known before the first one runs; else None.

        Args:
            space: The search space.
            trials: How many; None for the searcher's own number.
            seed: Fixes what is drawn.

        Raises:
            UserError: This space can't be searched in this way.
        """

    def check(self) -> None:
        """Refuse what this installation lacks.

        Raises:
            UserError: A package is missing.
        """


class Random(Searcher):
    """Independent draws."""

    kind: Literal["random"] = "random"

    def planned(
        self, space: Mapping[str, Dimension], trials: int | None, seed: int
    ) -> list[dict[str, Any]]:
        """See `Searcher.planned`."""
        chooser = RandomChooser(np.random.default_rng(seed))
        return [draw(space, chooser) for _ in range(trials or DEFAULT_TRIALS)]


class Grid(Searcher):
    """Every combination of a space of choices, once."""

    kind: Literal["grid"] = "grid"

    def planned(
        self, space: Mapping[str, Dimension], trials: int | None, seed: int
    ) -> list[dict[str, Any]]:
        """See `Searcher.planned`."""
        try:
            combinations = grid(space)
        except ValueError as error:
            raise UserError(str(error)) from None
        if trials is not None and trials < len(combinations):
            raise UserError(
                f"budget.trials = {trials}: the grid has {len(combinations)} combinations; must be "
                "at least that, or leave it away."
            )
        return combinations


class Optuna(Searcher):
    """Optuna's tree-structured Parzen estimator: later trials lie near good ones.

    Needs the extra `adaptive-platform[optuna]`.
    """

    kind: Literal["optuna"] = "optuna"

    def planned(self, space: Mapping[str, Dimension], trials: int | None, seed: int) -> None:
        """See `Searcher.planned`: what comes later depends on what came out before."""
        return

    def check(self) -> None:
        """See `Searcher.check`."""
        if importlib.util.find_spec("optuna") is None:
            raise UserError(
                "searcher.kind = optuna: Optuna is not installed. Install "
                "`adaptive-platform[optuna]`, or use searcher.kind=random."
            )


AnySearcher = union_of(Searcher)  # type: ignore[type-abstract]


@dataclass(frozen=True, slots=True)
class OptunaSpace:
    """A space as the function that Tune's `OptunaSearch` calls with each Optuna trial."""

    space: Mapping[str, Dimension]

    def __call__(self, trial: Any) -> dict[str, Any]:
        """The fields of the next trial, under one key beside Optuna's own parameters."""
        return {"fields": draw(self.space, _OptunaChooser(trial))}


class _OptunaChooser:
    """Lets an Optuna trial pick."""

    def __init__(self, trial: Any) -> None:
        self._trial = trial

    def choose(self, name: str, values: tuple[Any, ...]) -> Any:
        # By position: Optuna takes no lists as values.
        return values[self._trial.suggest_categorical(name, list(range(len(values))))]

    def real(self, name: str, low: float, high: float, *, log: bool) -> float:
        return float(self._trial.suggest_float(name, low, high, log=log))

    def integer(self, name: str, low: int, high: int, *, log: bool) -> int:
        return int(self._trial.suggest_int(name, low, high, log=log))
