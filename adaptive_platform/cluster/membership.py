"""The actor's side of live membership: hears members, asks Ray who is alive, answers with a list.

Nothing here imports torch: the actor starts with the driver, before the workers.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray

from adaptive_platform.cluster.roster import Generation, Roster, Verdict

__all__ = ["Assignment", "Member", "MembershipDesk", "MembershipStatus"]

_PING_SECONDS = 0.05
_KNOCK_SECONDS = 0.5
_SILENT_SECONDS = 5.0
"""A process that neither answers Ray nor is known to have ended counts as lost after this long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One worker, as it describes itself."""

    name: str
    node: str
    """Ray's id of its machine."""
    actor: Any
    """Handle of the actor that it runs in."""
    pid: int = 0
    """Its process, on its machine."""
    address: tuple[str, int] = ("", 0)
    """Where it listens for as long as it lives, and serves the store where it is the first."""
    placement_group: Any = None
    """Ray Train's, where the actor lives in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """One worker's place in the next generation; without a rank where it has none."""

    verdict: str
    rank: int | None = None
    number: int = 0
    nodes: tuple[str, ...] = ()
    """Machine of each rank."""
    address: tuple[str, int] = ("", 0)
    """Where rank 0 serves the store."""
    lost: tuple[str, ...] = ()
    joined: int = 0
    left: tuple[str, ...] = ()
    why: str = ""
    """What became of the last worker that was lost, where nobody goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipStatus:
    """What the driver needs to know to find replacements."""

    attempt: str
    present: tuple[str, ...] = ()
    """By rank."""
    pids: tuple[int, ...] = ()
    """Process of each of them, on its machine."""
    nodes: tuple[str, ...] = ()
    """Machine of each of them."""
    waiting: tuple[str, ...] = ()
    housed: tuple[str, ...] = ()
    """Machine of each worker of Ray Train that holds its place, a member or not."""
    placement_group: Any = None
    wanted: int = 1
    """Most workers now."""
    verdict: str = Verdict.RESTART.value


@dataclass(slots=True)
class _Waiting:
    future: asyncio.Future[Assignment]
    after: int
    """It waits for a later generation than this."""


@dataclass(slots=True)
class MembershipDesk:
    """Keeps one roster for all attempts of a run.

    Args:
        max_workers: Most members.
        max_losses: Losses without a committed step in between that are borne; see `Roster`.
    """

    max_workers: int
    max_losses: int
    roster: Roster = field(init=False)
    _attempt: str = ""
    _enrolled: dict[str, dict[int, Member]] = field(default_factory=dict)
    _members: dict[str, Member] = field(default_factory=dict)
    _first: tuple[str, ...] = ()
    _waiting: dict[str, _Waiting] = field(default_factory=dict)
    _pings: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _ended: bool = False

    def __post_init__(self) -> None:
        self.roster = Roster(self.max_workers, self.max_losses)

    # --- calls of workers -------------------------------------------------------------------

    def enroll(self, attempt: str, rank: int, world_size: int, member: Member) -> None:
        """A worker that Ray Train started is there; the attempt begins when all of them are."""
        enrolled = self._enrolled.setdefault(attempt, {})
        enrolled[rank] = member
        self._knock_soon(member)
        if len(enrolled) < world_size:
            return
        self._dismiss()
        self._attempt = attempt
        self._members = {m.name: m for m in enrolled.values()}
        self._first = tuple(enrolled[r].name for r in range(world_size))
        self.roster.begin(self._first)

    async def next(self, attempt: str, member: Member, *, join: bool) -> Assignment:
        """A worker has stopped, or is ready to join: its place, once that is settled."""
        if attempt != self._attempt or self._ended:
            return Assignment(verdict=Verdict.OVER.value)
        self._members[member.name] = member
        self._knock_soon(member)
        if join:
            self.roster.join(member.name)
        else:
            self.roster.stop(member.name)
        future: asyncio.Future[Assignment] = asyncio.get_running_loop().create_future()
        self._waiting[member.name] = _Waiting(future, self.roster.generation.number)
        self._settle()
        return await future

    def lose(self, attempt: str, name: str, why: str) -> None:
        """A worker says that it ends, and why."""
        if attempt == self._attempt:
            self.roster.lose(name, why)
            self._settle()

    def finish(self, attempt: str, name: str) -> None:
        """A worker came to the end of the run."""
        if attempt == self._attempt:
            self.roster.finish(name)
            self._settle()

    def end(self) -> None:
        """The run is over for a reason that all must take as theirs; nobody goes on."""
        self._ended = True
        self._dismiss()

    # --- calls of the driver and of Ray Train -----------------------------------------------

    async def verdict(self) -> str:
        """What becomes of the run, as far as Ray knows who is alive."""
        if self._ended:
            return Verdict.OVER.value
        await asyncio.gather(*(self._lose_if_dead(name) for name in self.roster.present))
        self._settle()
        return self.roster.verdict.value

    def status(self) -> MembershipStatus:
        """Who is there and who is missing."""
        present, waiting = self.roster.present, self.roster.waiting
        self._look_after([name for name in self._first if name not in present])
        group = [self._members[n].placement_group for n in self._first if n in self._members]
        return MembershipStatus(
            attempt=self._attempt,
            present=present,
            pids=tuple(self._members[name].pid for name in present),
            nodes=tuple(self._members[name].node for name in present),
            waiting=waiting,
            wanted=self.roster.max_workers,
            housed=tuple(self._members[n].node for n in self._first if n not in self._dead),
            placement_group=group[0] if group else None,
            verdict=Verdict.OVER.value if self._ended else self.roster.verdict.value,
        )

    def want(self, workers: int) -> None:
        """The run should have that many workers; those of the highest ranks leave."""
        self.roster.max_workers = min(workers, self.max_workers)
        for name in self.roster.present[self.roster.max_workers :]:
            self.roster.ask_to_leave(name, f"{workers} workers are enough")

    def drain(self, nodes: set[str]) -> None:
        """Machines that will go away: their workers are to leave between two steps."""
        for name in self.roster.present:
            if self._members[name].node in nodes:
                self.roster.ask_to_leave(name, "its node drains")

    # --- inside -----------------------------------------------------------------------------

    _dead: set[str] = field(default_factory=set)
    _doors: set[tuple[str, int]] = field(default_factory=set)
    _knocks: set[asyncio.Task[None]] = field(default_factory=set)
    _looks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _closing: asyncio.Task[None] | None = None

    def _settle(self) -> None:
        """Answer who can be answered, and ask Ray about those that are waited for."""
        if self.roster.closing and self.roster.verdict is Verdict.GO_ON:
            if self._closing is None:
                self._closing = asyncio.get_running_loop().create_task(self._close())
            return
        self._advance()

    async def _close(self) -> None:
        """See whether those that stopped are still there, and begin without the others."""
        await asyncio.gather(*(self._hear(name) for name in self.roster.closing))
        self._closing = None
        self._advance()

    def _advance(self) -> None:
        generation = self.roster.next()
        if generation is not None:
            self._answer(generation)
        elif self.roster.verdict is not Verdict.GO_ON:
            self._dismiss()
        for name in self.roster.awaited:
            if name not in self._pings:
                self._pings[name] = asyncio.get_running_loop().create_task(self._watch(name))

    def _answer(self, generation: Generation) -> None:
        nodes = tuple(self._members[name].node for name in generation.members)
        address = self._members[generation.members[0]].address
        for name, waiting in list(self._waiting.items()):
            if name in generation.members:
                given = Assignment(
                    verdict=Verdict.GO_ON.value,
                    rank=generation.members.index(name),
                    number=generation.number,
                    nodes=nodes,
                    address=address,
                    lost=generation.lost,
                    joined=len(generation.joined),
                    left=generation.left,
                )
            elif name in self.roster.waiting:
                continue
            else:
                given = Assignment(verdict=Verdict.GO_ON.value)
            del self._waiting[name]
            waiting.future.set_result(given)

    def _dismiss(self) -> None:
        verdict = Verdict.OVER if self._ended else self.roster.verdict
        for waiting in self._waiting.values():
            waiting.future.set_result(Assignment(verdict=verdict.value, why=self.roster.last_loss))
        self._waiting = {}

    def _look_after(self, names: list[str]) -> None:
        """See, without waiting, whether those that are no members any more still hold a place."""
        with suppress(RuntimeError):  # no loop runs where a test calls this directly
            loop = asyncio.get_running_loop()
            for name in names:
                if name not in self._dead and name not in self._looks:
                    self._looks[name] = loop.create_task(self._see(name))

    async def _see(self, name: str) -> None:
        try:
            await self._lose_if_dead(name)
        finally:
            del self._looks[name]

    async def _watch(self, name: str) -> None:
        """Until `name` has stopped as the others have, or is known to be gone."""
        try:
            while name in self.roster.awaited and not self._ended:
                await self._hear(name)
                await asyncio.sleep(_PING_SECONDS)
        finally:
            del self._pings[name]
        self._settle()

    async def _hear(self, name: str) -> None:
        """Until `name` answers, or is lost."""
        loop = asyncio.get_running_loop()
        asked = loop.time()
        while await self._lose_if_dead(name) is None:
            if loop.time() - asked > _SILENT_SECONDS:
                self.roster.lose(name, f"no answer for {_SILENT_SECONDS:g} s")
                break
            await asyncio.sleep(_PING_SECONDS)

    async def _lose_if_dead(self, name: str) -> bool | None:
        """Whether `name` lives; None where neither it nor Ray has said so in a second.

        Ray knows at once of a process that ended, but only after half a minute of a node that did;
        where the node still answers, a closed port says it too.
        """
        try:
            await asyncio.wait_for(self._ping(self._members[name]), 1.0)
        except asyncio.TimeoutError:
            return None
        except (ray.exceptions.RayError, ConnectionRefusedError):
            self._dead.add(name)
            self.roster.lose(name, "its process or node ended")
            return False
        return True

    async def _ping(self, member: Member) -> None:
        await self._knock(member)
        await member.actor.__ray_ready__.remote()

    def _knock_soon(self, member: Member) -> None:
        with suppress(RuntimeError):  # no loop runs where a test calls this directly
            task = asyncio.get_running_loop().create_task(self._knock(member))
            self._knocks.add(task)
            task.add_done_callback(self._knocks.discard)

    async def _knock(self, member: Member) -> None:
        """See whether its port is open.

        Raises:
            ConnectionRefusedError: It was open once and is closed now. A port that never was may
                be a firewall's doing and means nothing.
        """
        try:
            opened = asyncio.open_connection(*member.address)
            _, writer = await asyncio.wait_for(opened, _KNOCK_SECONDS)
        except ConnectionRefusedError:
            if member.address in self._doors:
                raise
        except (OSError, asyncio.TimeoutError):
            pass
        else:
            self._doors.add(member.address)
            writer.close()
