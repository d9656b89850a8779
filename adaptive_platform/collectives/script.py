"""A whole reduction of one worker as one flat list of instructions, as data.

What phases, groups, slices and segments mean is worked out here, once per length of a buffer, so
that an executor only follows a list: with short messages its own work is most of what they cost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import NamedTuple

from adaptive_platform.collectives.pipeline import Program, Step, compile_program
from adaptive_platform.collectives.plan import Phase, Plan
from adaptive_platform.collectives.schedules import (
    Algorithm,
    Op,
    chunk_bounds,
    piece_bounds,
    rounds_of,
)

__all__ = ["Act", "Instruction", "Script", "native_phase", "write_script"]


class Act(IntEnum):
    """What an instruction does with elements `[start, stop)` of the buffer."""

    RECEIVE = 0
    """Let a message come, in place or into a scratch slot."""
    SEND = 1
    AWAIT_SENT = 2
    AWAIT_RECEIVED = 3
    ADD_RECEIVED = 4
    """Wait for a message and add it to the buffer."""
    BEGIN_SUM = 5
    """Let the backend sum the elements over the phase's group."""
    AWAIT_SUM = 6


class Instruction(NamedTuple):
    """One thing that one worker does."""

    act: Act
    phase: int
    """Whose group of this worker is meant."""
    start: int
    stop: int
    work: int
    """Number of the operation that begins here, or that is awaited here."""
    peer: int = 0
    """Position in the group."""
    tag: int = 0
    slot: int = -1
    """Scratch memory of an arriving message; -1 for the buffer itself."""
    final: bool = False
    """What is sent takes the place of what the receiver has, and will not change again."""


@dataclass(frozen=True, slots=True)
class Script:
    """All that one worker does to reduce a buffer of one length."""

    instructions: tuple[Instruction, ...]
    num_works: int
    slot_length: int
    """Elements that a scratch slot must hold."""


def native_phase(plan: Plan) -> int | None:
    """Index of the first phase that the backend sums by itself: an all-reduce in a ring."""
    for index, phase in enumerate(plan.phases):
        if phase.op is Op.ALL_REDUCE and phase.algorithm is Algorithm.RING:
            return index
    return None


def write_script(
    plan: Plan,
    rank: int,
    length: int,
    *,
    segment: int,
    in_flight: int,
    num_slices: int = 1,
    native: bool = True,
    exact: bool = True,
    phases: tuple[int, int] | None = None,
) -> Script:
    """Work out what `rank` does; all workers call it with the same arguments otherwise.

    Args:
        plan: What to do.
        rank: This worker.
        length: Elements of the buffer.
        segment: Largest number of elements in one message.
        in_flight: Receives posted ahead, which is also the number of scratch slots.
        num_slices: Parts that go through the phases one behind the other, where there is a
            phase that the backend sums by itself.
        native: Leave such a phase to the backend; if not, it is made of messages like the others.
        exact: Messages are of the buffer's own type. If not, the backend's sums are of no use and
            everything that arrives goes through scratch memory.
        phases: First of the phases to do and the one behind the last; all, unless given. The rest
            is done by a script of its own.
    """
    writer = _Writer(plan, rank, segment, in_flight, exact=exact)
    if phases is not None:
        return writer.write_part(length, *phases)
    return writer.write(length, num_slices, native=native and exact)


class _Writer:
    def __init__(self, plan: Plan, rank: int, segment: int, in_flight: int, *, exact: bool) -> None:
        self._plan = plan
        self._rank = rank
        self._segment = segment
        self._in_flight = in_flight
        self._exact = exact
        self._works = 0
        self._slot_length = 0
        # Members of a group pass through the same phases with it, so they count alike.
        self._next_tag: defaultdict[tuple[int, ...], int] = defaultdict(int)

    def write(self, length: int, num_slices: int, *, native: bool) -> Script:
        middle = native_phase(self._plan) if native else None
        last = len(self._plan.phases)
        written: list[Instruction] = []
        if middle is None:
            written += self._messages(range(last), 0, length)
        else:
            bounds = chunk_bounds(0, length, num_slices)
            sums: list[list[Instruction]] = []
            for start, stop in pairwise(bounds):
                written += self._messages(range(middle), start, stop)
                sums.append(list(self._sum(middle, start, stop)))
                written += sums[-1][:1]
            for (start, stop), under_way in zip(pairwise(bounds), sums, strict=True):
                written += under_way[1:]
                written += self._messages(range(middle + 1, last), start, stop)
        return Script(tuple(_hoisted(written)), self._works, self._slot_length)

    def write_part(self, length: int, first: int, last: int) -> Script:
        # Phases before count too: two halves of one reduction share no tag.
        for _ in self._messages(range(first), 0, length):
            pass
        self._works = self._slot_length = 0
        written = list(self._messages(range(first, last), 0, length))
        return Script(tuple(_hoisted(written)), self._works, self._slot_length)

    def _sum(self, index: int, start: int, stop: int) -> Iterator[Instruction]:
        span = self._plan.spans(self._rank, stop - start)[index]
        if self._plan.phases[index].place(self._rank) is None or not span.length:
            return
        elements = start + span.start, start + span.stop
        yield Instruction(Act.BEGIN_SUM, index, *elements, self._works)
        yield Instruction(Act.AWAIT_SUM, index, *elements, self._works)
        self._works += 1

    def _messages(self, phases: range, start: int, stop: int) -> Iterator[Instruction]:
        """Some phases of one slice, by messages; a phase without elements is left out by all."""
        spans = self._plan.spans(self._rank, stop - start)
        for index in phases:
            phase, span = self._plan.phases[index], spans[index]
            place = phase.place(self._rank)
            if place is not None and span.length:
                group, position = phase.groups[place[0]], place[1]
                program = self._program(phase, group, position, start + span.start, span.length)
                yield from self._follow(index, program, self._next_tag[group])
                self._next_tag[group] += program.num_tags

    def _program(
        self, phase: Phase, group: tuple[int, ...], position: int, start: int, length: int
    ) -> Program:
        return compile_program(
            rounds_of(phase.op, phase.algorithm, len(group), position),
            piece_bounds(phase.algorithm, start, start + length, len(group)),
            self._segment,
            self._in_flight,
        )

    def _follow(self, index: int, program: Program, first_tag: int) -> Iterator[Instruction]:
        self._slot_length = max(self._slot_length, program.slot_length)
        sent, received = self._works, self._works + len(program.sends)
        self._works = received + len(program.receives)
        for action in program.actions:
            number = action.index
            if action.step in (Step.SEND, Step.AWAIT_SENT):
                message, work = program.sends[number], sent + number
                act = Act.SEND if action.step is Step.SEND else Act.AWAIT_SENT
            else:
                message, work = program.receives[number], received + number
                act = Act.ADD_RECEIVED if message.add else Act.AWAIT_RECEIVED
                if action.step is Step.RECEIVE:
                    act = Act.RECEIVE
            yield Instruction(
                act,
                index,
                message.start,
                message.stop,
                work,
                message.peer,
                first_tag + message.tag,
                number % self._in_flight if message.add or not self._exact else -1,
                not message.add,
            )


def _hoisted(written: list[Instruction]) -> Iterator[Instruction]:
    """The same with the first receives of all gathering phases at the front.

    A message whose receiver is ready leaves at once; otherwise the two must talk first. It is safe
    that early, since what arrives is a result that holds this worker's own part, so everything
    this worker had to send of it has been read by then.
    """
    early: list[Instruction] = []
    rest: list[Instruction] = []
    open_phases: set[int] = set()
    for instruction in written:
        ready = instruction.act is Act.RECEIVE and instruction.slot < 0
        if ready and instruction.phase not in open_phases:
            early.append(instruction)
            continue
        rest.append(instruction)
        if instruction.act in (Act.AWAIT_RECEIVED, Act.ADD_RECEIVED):
            open_phases.add(instruction.phase)
    return iter(early + rest)
