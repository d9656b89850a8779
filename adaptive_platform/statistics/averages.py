"""Bias-corrected exponential averages that forget by samples, not by steps."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["SampleAverages", "kept"]


def kept(samples: float, half_life_samples: float) -> float:
    """Share of the past that is left after `samples`: `2^(-n/h)`.

    Whether h samples come in one step or in a hundred, what was known before counts half.
    """
    return 2.0 ** (-samples / half_life_samples)


class SampleAverages:
    """Averages of several numbers that share one weight, so that their ratios stay consistent.

    Dividing by the sum of the weights removes the pull of the empty start.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self._sums = dict.fromkeys(names, 0.0)
        self._weight = 0.0

    @property
    def empty(self) -> bool:
        """True before the first observation."""
        return self._weight == 0.0

    def add(self, keep: float, **values: float) -> None:
        """Let an observation in.

        Args:
            keep: What the past is multiplied by, in [0, 1); see `kept`.
            **values: One finite number for each name.
        """
        for name in self._sums:
            self._sums[name] = keep * self._sums[name] + (1.0 - keep) * values[name]
        self._weight = keep * self._weight + (1.0 - keep)

    def __getitem__(self, name: str) -> float:
        return self._sums[name] / self._weight

    def clear(self) -> None:
        """Forget everything."""
        self._sums = dict.fromkeys(self._sums, 0.0)
        self._weight = 0.0

    def state_dict(self) -> dict[str, float]:
        """Plain numbers for a checkpoint."""
        return {**self._sums, "weight": self._weight}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from `state_dict`, bit for bit."""
        self._sums = {name: float(state[name]) for name in self._sums}
        self._weight = float(state["weight"])
