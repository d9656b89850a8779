"""Samples that can't be read: each named once, counted, and too many of them an error."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from adaptive_platform.errors import DataError

__all__ = ["BrokenLedger", "BrokenSample"]


@dataclass(frozen=True, slots=True)
class BrokenSample:
    """One sample that could not be read."""

    id: int
    """Index in the data set."""
    where: str
    """Path, or file and row."""
    reason: str

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


class BrokenLedger:
    """Account of the broken samples of one data set, over all workers and epochs.

    Pure: every worker that is given the same samples in the same order reaches the same verdict,
    so hand it what all workers found, not only one's own.

    Args:
        size: Samples in the data set.
        max_share: Share of it that may be broken.
    """

    def __init__(self, size: int, max_share: float) -> None:
        self._size = size
        self._max_share = max_share
        self._found: dict[str, str] = {}
        self.skips = 0
        """Times a broken sample was left out; one per epoch for each."""

    @property
    def paths(self) -> tuple[str, ...]:
        """Every broken path, in order of discovery."""
        return tuple(self._found)

    def record(self, samples: Iterable[BrokenSample]) -> tuple[BrokenSample, ...]:
        """Enter what a step met.

        Returns:
            Those not met before: report these.

        Raises:
            DataError: More than the allowed share of the data set is broken.
        """
        news = []
        for sample in samples:
            self.skips += 1
            if sample.where not in self._found:
                self._found[sample.where] = sample.reason
                news.append(sample)
        if news and len(self._found) > self._max_share * self._size:
            shown = "; ".join(f"{where}: {why}" for where, why in list(self._found.items())[:3])
            raise DataError(
                f"data: {len(self._found)} of {self._size} samples can't be read, more than "
                f"max_broken_share = {self._max_share:g} allows ({shown}"
                f"{'; ...' if len(self._found) > 3 else ''}). Mend or remove them, or raise "
                "data.max_broken_share."
            )
        return tuple(news)

    def state_dict(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return {"found": dict(self._found), "skips": self.skips}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue an account that `state_dict` saved."""
        self._found = dict(state["found"])
        self.skips = int(state["skips"])
