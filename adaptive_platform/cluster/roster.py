"""Who works together: members come, leave and are lost; pure decisions, no clock and no Ray.

A generation is closed once each of its members has stopped at its end or is gone; the next one
consists of those that stopped, in their old order, and of those that wait to join.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

__all__ = ["Generation", "Roster", "Verdict"]


class Verdict(Enum):
    """What becomes of the run as a whole."""

    GO_ON = "go on"
    """There are members."""
    RESTART = "restart"
    """Nobody is left who has the run's state: start again from a checkpoint."""
    GIVE_UP = "give up"
    """Workers were lost too many times without a step in between."""
    OVER = "over"
    """All members have finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A list of members, and what changed since the one before."""

    number: int
    """Counts the generations of an attempt, from 0."""
    members: tuple[str, ...]
    """By rank."""
    joined: tuple[str, ...] = ()
    """Those of the members that have no state of the run yet."""
    lost: tuple[str, ...] = ()
    """Who was lost and why, in words."""
    left: tuple[str, ...] = ()
    """Who left as planned and why, in words."""


class Roster:
    """The members of one attempt to run.

    All that one generation loses is one loss: a node takes all its workers along.

    Args:
        max_workers: Most members; more joiners have to wait.
        max_losses: Losses that are borne without a committed step in between.
    """

    def __init__(self, max_workers: int, max_losses: int) -> None:
        self.max_workers = max_workers
        self._max_losses = max_losses
        self._losses = 0
        """Of the generations that are closed."""
        self._gone: dict[str, str] = {}
        self.last_loss = ""
        """Why the last lost worker was lost; empty before there is one."""
        self.begin(())

    def begin(self, members: Iterable[str]) -> None:
        """Start anew with `members`, in this order; nobody of an earlier attempt belongs to it.

        The steps that they make again count as steps.
        """
        self._losses = self._num_losses
        self._step = 0
        self._generation = Generation(number=0, members=tuple(members))
        self._stopped: set[str] = set()
        self._finished: set[str] = set()
        self._concluded = False
        self._gone = {}
        self._leaving: dict[str, str] = {}
        self._waiting: list[str] = []

    # --- what happens -----------------------------------------------------------------------

    def stop(self, member: str) -> None:
        """`member` has stopped at the end of its generation and asks for the next one.

        One that was taken for lost meanwhile waits to join again.
        """
        if member in self._generation.members and member not in self._gone:
            self._stopped.add(member)
        else:
            self.join(member)

    def join(self, member: str) -> None:
        """`member` is ready to take part."""
        at_work = member in self._generation.members and member not in self._gone
        if member not in self._waiting and not at_work:
            self._waiting.append(member)

    def lose(self, member: str, why: str) -> None:
        """`member` is gone, or as good as gone."""
        if member in self._waiting:
            self._waiting.remove(member)
        elif member in self._generation.members and member not in self._done:
            self._gone[member] = self.last_loss = why

    def ask_to_leave(self, member: str, why: str) -> None:
        """`member` is to leave between two steps; the last one stays."""
        if member in self._generation.members and member not in self._done:
            self._leaving.setdefault(member, why)

    def finish(self, member: str) -> None:
        """`member` came to the end of the run, or was sent away."""
        if member in self._generation.members and member not in self._gone:
            self._finished.add(member)
            self._stopped.discard(member)

    def conclude(self) -> None:
        """The run's result was told; before that, a run whose last worker is lost has none."""
        self._concluded = True

    def commit(self, step: int) -> None:
        """A step was committed: what earlier generations lost is forgotten."""
        if step > self._step:
            self._step, self._losses = step, 0

    # --- what follows -----------------------------------------------------------------------

    @property
    def generation(self) -> Generation:
        """The generation that is at work."""
        return self._generation

    @property
    def waiting(self) -> tuple[str, ...]:
        """Who waits to join."""
        return tuple(self._waiting)

    @property
    def present(self) -> tuple[str, ...]:
        """Members at work or stopped."""
        return tuple(m for m in self._generation.members if m not in self._done)

    @property
    def awaited(self) -> tuple[str, ...]:
        """Members that have to stop, now that another one has; none while all are at work."""
        if not self._stopped:
            return ()
        return tuple(m for m in self.present if m not in self._stopped)

    @property
    def closing(self) -> tuple[str, ...]:
        """Members of a generation that can be closed but lost somebody; none where not so.

        A node's processes end one after the other: the last ones have time to stop as well, and
        belong to the lost. Whoever asks about them does so before `next`.
        """
        return () if self.awaited or not self._gone else tuple(self._stopped)

    @property
    def change_wanted(self) -> bool:
        """True when members at work should stop between two steps."""
        leaving = [m for m in self.present if m in self._leaving]
        room = len(self.present) - len(leaving) < self.max_workers
        return bool(self._waiting and room) or 0 < len(leaving) < len(self.present)

    @property
    def verdict(self) -> Verdict:
        """What becomes of the run."""
        if self._num_losses > self._max_losses:
            return Verdict.GIVE_UP
        if self.present:
            return Verdict.GO_ON
        return Verdict.OVER if self._finished and self._concluded else Verdict.RESTART

    def next(self) -> Generation | None:
        """Close the generation, where it can be closed, and begin the next one."""
        staying = [m for m in self.present if m in self._stopped]
        if not staying or self.awaited or self.verdict is not Verdict.GO_ON:
            return None
        leaving = {m: self._leaving[m] for m in staying if m in self._leaving}
        # Somebody has to hand the state over; it is asked again to leave.
        staying = [m for m in staying if m not in leaving] or staying[:1]
        leaving = {m: why for m, why in leaving.items() if m not in staying}
        self._losses = self._num_losses
        room = max(self.max_workers - len(staying), 0)
        joining, self._waiting = self._waiting[:room], self._waiting[room:]
        rank = {m: str(r) for r, m in enumerate(self._generation.members)}
        self._generation = Generation(
            number=self._generation.number + 1,
            members=(*staying, *joining),
            joined=tuple(joining),
            lost=tuple(f"worker {rank[m]} ({why})" for m, why in self._gone.items()),
            left=tuple(f"worker {rank[m]} ({why})" for m, why in leaving.items()),
        )
        self._stopped, self._finished, self._gone = set(), set(), {}
        self._leaving = {m: why for m, why in self._leaving.items() if m in staying}
        return self._generation

    @property
    def _num_losses(self) -> int:
        return self._losses + bool(self._gone)

    @property
    def _done(self) -> set[str]:
        return set(self._gone) | self._finished
