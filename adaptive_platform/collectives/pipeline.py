"""Turns one worker's rounds into an ordered list of segment-sized actions, as data.

A chunk travels in segments, so that a segment is passed on while the next one still arrives. What
must wait for what is worked out here, once per buffer length; the executor only follows the list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from adaptive_platform.collectives.schedules import Round, Transfer

__all__ = ["Action", "Message", "Program", "Step", "compile_program"]


class Step(Enum):
    """What an action does with its message."""

    SEND = "send"
    AWAIT_SENT = "await_sent"
    RECEIVE = "receive"
    AWAIT_RECEIVED = "await_received"
    """Wait for the message and, where it says so, add it to the buffer."""


@dataclass(frozen=True, slots=True)
class Message:
    """Elements `[start, stop)` of the buffer on their way to or from a group position."""

    peer: int
    tag: int
    """The same number on both ends, different for each message of a program."""
    turn: int
    start: int
    stop: int
    add: bool
    """The receiver adds it to its buffer; otherwise it replaces what is there."""


@dataclass(frozen=True, slots=True)
class Action:
    """One step for one message."""

    step: Step
    index: int
    """Index into the program's `sends` or `receives`."""


@dataclass(frozen=True, slots=True)
class Program:
    """Everything one worker does in one phase, in order."""

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]
    actions: tuple[Action, ...]
    in_flight: int
    """Receives posted ahead at most; where receive `i` needs scratch, it is slot
    `i % in_flight`."""
    num_tags: int
    """Tags of its messages lie below, on all workers of the group alike."""

    @property
    def slot_length(self) -> int:
        """Elements that a scratch slot must hold."""
        return max((m.stop - m.start for m in self.receives), default=0)


def compile_program(
    rounds: Sequence[Round], bounds: Sequence[int], segment: int, in_flight: int = 4
) -> Program:
    """Order the messages of one worker so that nothing is sent before it is complete.

    Nothing needs to guard what a replacing receive overwrites: the result that arrives contains
    this worker's own contribution, so the send of that contribution has ended long before.

    Args:
        rounds: The worker's turns, from `schedules.rounds_of`.
        bounds: Element boundaries of the group's chunks.
        segment: Largest number of elements in one message.
        in_flight: Number of receives to post ahead.
    """
    stride = (bounds[-1] - bounds[0]) // segment + 2
    sends: list[Message] = []
    receives: list[Message] = []
    for turn, plan in enumerate(rounds):
        sends += _messages(plan.send, turn, bounds, segment, stride, plan.add)
        receives += _messages(plan.receive, turn, bounds, segment, stride, plan.add)
    needed = _receives_before(sends, receives)
    actions: list[Action] = []
    sent = posted = received = 0
    while True:
        # Receives first: a message whose receiver is ready leaves without asking.
        while posted < min(len(receives), received + in_flight):
            actions.append(Action(Step.RECEIVE, posted))
            posted += 1
        while sent < len(sends) and needed[sent] <= received:
            actions.append(Action(Step.SEND, sent))
            sent += 1
        if received == len(receives):
            break
        actions.append(Action(Step.AWAIT_RECEIVED, received))
        received += 1
    assert sent == len(sends), "a send that waits for data nobody brings"
    actions.extend(Action(Step.AWAIT_SENT, index) for index in range(sent))
    return Program(tuple(sends), tuple(receives), tuple(actions), in_flight, len(rounds) * stride)


def _messages(
    transfer: Transfer | None,
    turn: int,
    bounds: Sequence[int],
    segment: int,
    stride: int,
    add: bool,
) -> list[Message]:
    if transfer is None:
        return []
    start, stop = bounds[transfer.start], bounds[transfer.stop]
    return [
        Message(transfer.peer, turn * stride + number, turn, low, min(low + segment, stop), add)
        for number, low in enumerate(range(start, stop, segment))
    ]


def _receives_before(sends: Sequence[Message], receives: Sequence[Message]) -> list[int]:
    """For each send, how many receives must be over: up to the last that brings part of it."""
    turns: dict[int, list[int]] = {}
    for index, message in enumerate(receives):
        turns.setdefault(message.turn, []).append(index)
    newest_first = sorted(turns, reverse=True)
    needed: list[int] = []
    for send in sends:
        hits: list[int] = []
        for turn in newest_first:
            if turn < send.turn and not hits:
                hits = [
                    index
                    for index in turns[turn]
                    if receives[index].start < send.stop and receives[index].stop > send.start
                ]
        needed.append(hits[-1] + 1 if hits else 0)
    return needed
