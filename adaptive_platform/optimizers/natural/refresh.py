"""When a statistic is computed anew: SP-NGD's adaptive interval, fixed ones, and a limit per step.

Pure: a state goes in, the next one comes out, so all workers that see the same values agree.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

__all__ = [
    "AdaptiveRefresh",
    "Candidate",
    "FixedRefresh",
    "RefreshPolicy",
    "RefreshState",
    "choose",
    "in_steps",
    "next_interval",
]


@dataclass(frozen=True, slots=True)
class RefreshState:
    """Where one statistic stands; steps are committed steps."""

    due: int = 0
    """Step at which it is computed next."""
    count: int = 0
    """Refreshes so far."""
    last: int = 1
    """D1: the last interval, in steps."""
    before: int = 1
    """D2: the interval before it."""


def next_interval(last: int, before: int, *, to_last: bool, to_older: bool) -> int:
    """Steps until the next refresh (Osawa et al. 2020, arXiv 2002.06015, stale statistics).

    Args:
        last: D1, the last interval.
        before: D2, the one before.
        to_last: The new value is similar to the last one.
        to_older: It is similar to the one before that.
    """
    if not to_last:
        return max(1, last // 2)
    return last + before if to_older else last


class RefreshPolicy(ABC):
    """How a statistic's values are kept, and when the next one is due."""

    keeps_older: bool
    """The value before the last one is kept for comparison."""
    inverse_interval: int | None
    """Steps between inverses at the reference batch; None: one with every new value."""

    @property
    @abstractmethod
    def newest_only(self) -> bool:
        """A new value takes the place of the old one, so that its rank is that of one batch."""

    @abstractmethod
    def merge(self, old: Tensor | None, new: Tensor, count: int, batch_ratio: float) -> Tensor:
        """The value to keep.

        Args:
            old: What was kept, None at first.
            new: The value of this step's batch.
            count: Refreshes so far, this one not counted.
            batch_ratio: This step's batch over the reference batch.
        """

    @abstractmethod
    def after(
        self, state: RefreshState, step: int, *, to_last: bool, to_older: bool, batch_ratio: float
    ) -> RefreshState:
        """The state after a refresh at `step`."""


@dataclass(frozen=True)
class AdaptiveRefresh(RefreshPolicy):
    """Only the newest batch's value counts; the interval grows while it changes little."""

    keeps_older = True
    inverse_interval = None
    newest_only = True

    def merge(self, old: Tensor | None, new: Tensor, count: int, batch_ratio: float) -> Tensor:
        """The new value."""
        return new

    def after(
        self, state: RefreshState, step: int, *, to_last: bool, to_older: bool, batch_ratio: float
    ) -> RefreshState:
        """Fibonacci growth, unconditional until two values exist."""
        interval = 1
        if state.count >= 2:
            interval = next_interval(state.last, state.before, to_last=to_last, to_older=to_older)
        return RefreshState(step + interval, state.count + 1, interval, state.last)


@dataclass(frozen=True)
class FixedRefresh(RefreshPolicy):
    """Fixed intervals and a running average, both in units of the reference batch.

    With a batch of k times the reference, intervals are k times shorter in steps and the average
    forgets k times faster, so that both cover the same samples.
    """

    interval: int
    """Steps between two values."""
    inverse_interval: int
    """Steps between two inverses."""
    decay: float
    """Share of the old average that stays; the k-th value, from 1, uses at most 1 - 1/k."""

    keeps_older = False

    @property
    def newest_only(self) -> bool:
        """Without decay."""
        return self.decay == 0.0

    def merge(self, old: Tensor | None, new: Tensor, count: int, batch_ratio: float) -> Tensor:
        """`S <- e S + (1 - e) S_new`, `e = min(1 - 1/k, decay)` (Martens & Grosse 2015)."""
        if old is None or self.newest_only:
            return new
        return old.lerp(new, 1.0 - min(1.0 - 1.0 / (count + 1), self.decay**batch_ratio))

    def after(
        self, state: RefreshState, step: int, *, to_last: bool, to_older: bool, batch_ratio: float
    ) -> RefreshState:
        """Due again one interval later."""
        interval = in_steps(self.interval, batch_ratio)
        return RefreshState(step + interval, state.count + 1, interval, state.last)


def in_steps(interval: int, batch_ratio: float) -> int:
    """An interval at the reference batch in steps of another batch; at least 1."""
    return max(1, round(interval / batch_ratio))


@dataclass(frozen=True, slots=True)
class Candidate:
    """Something that is due."""

    overdue: int
    """Steps since it became due; >= 0."""
    cost: float
    """Work in any unit."""
    urgent: bool
    """Has no value at all yet."""


def choose(candidates: Sequence[Candidate], credit: float) -> list[int]:
    """Which candidates to take now, so that refreshing takes a steady part of the time.

    Urgent ones all, free of charge; then the longest overdue while credit is left. The last one
    may cost more than that: the debt is for later steps to work off, so that a large inverse is
    made as often as it can be afforded, and not never.

    Args:
        candidates: What is due, in an order that all workers share.
        credit: Work saved up; <= 0 takes urgent ones only.

    Returns:
        Indices in rising order.
    """
    chosen = [index for index, each in enumerate(candidates) if each.urgent]
    waiting = [index for index, each in enumerate(candidates) if not each.urgent]
    for index in sorted(waiting, key=lambda index: -candidates[index].overdue):
        if credit <= 0:
            break
        chosen.append(index)
        credit -= candidates[index].cost
    return sorted(chosen)
