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
    add: bool = False


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
    """Receives posted ahead at most; an adding receive `i` lands in scratch slot
    `i % in_flight`."""

    @property
    def slot_length(self) -> int:
        """Elements that a scratch slot must hold."""
        return max((m.stop - m.start for m in self.receives if m.add), default=0)


def compile_program(
    rounds: Sequence[Round], bounds: Sequence[int], segment: int, in_flight: int = 4
) -> Program:
    """Order the messages of one worker so that data is never read or written too early.

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
        sends += _messages(plan.send, turn, bounds, segment, stride)
        receives += _messages(plan.receive, turn, bounds, segment, stride, plan.add)
    data_for_send = _prerequisites(sends, receives, same_turn=False)
    sent_before = _prerequisites(receives, sends, same_turn=True)
    data_before = _prerequisites(receives, receives, same_turn=False)

    actions: list[Action] = []
    sent = awaited = posted = received = 0
    while True:
        while sent < len(sends) and data_for_send[sent] <= received:
            actions.append(Action(Step.SEND, sent))
            sent += 1
        while posted < min(len(receives), received + in_flight):
            # An adding receive lands in scratch and can be posted at any time; a replacing one
            # lands in the buffer, so what it overwrites must have been summed and sent first.
            if not receives[posted].add:
                if data_before[posted] > received or sent_before[posted] > sent:
                    break
                if sent_before[posted] > awaited and posted > received:
                    break  # waiting for a send here could wait for a peer that waits for us
                awaited = _await_sends(actions, awaited, sent_before[posted])
            actions.append(Action(Step.RECEIVE, posted))
            posted += 1
        if received == len(receives):
            break
        assert posted > received, "a program that waits for itself"
        if receives[received].add:
            assert sent_before[received] <= sent, "a sum that waits for its own result"
            awaited = _await_sends(actions, awaited, sent_before[received])
        actions.append(Action(Step.AWAIT_RECEIVED, received))
        received += 1
    _await_sends(actions, awaited, len(sends))
    return Program(tuple(sends), tuple(receives), tuple(actions), in_flight)


def _await_sends(actions: list[Action], awaited: int, until: int) -> int:
    actions.extend(Action(Step.AWAIT_SENT, index) for index in range(awaited, until))
    return max(awaited, until)


def _messages(
    transfer: Transfer | None,
    turn: int,
    bounds: Sequence[int],
    segment: int,
    stride: int,
    add: bool = False,
) -> list[Message]:
    if transfer is None:
        return []
    start, stop = bounds[transfer.start], bounds[transfer.stop]
    return [
        Message(transfer.peer, turn * stride + number, turn, low, min(low + segment, stop), add)
        for number, low in enumerate(range(start, stop, segment))
    ]


def _prerequisites(
    later: Sequence[Message], earlier: Sequence[Message], *, same_turn: bool
) -> list[int]:
    """For each message, how many of `earlier` must be over, since they touch the same elements.

    Counts are prefixes of `earlier`: everything before the last overlapping message is included.
    `same_turn` says whether messages of one's own turn count.
    """
    turns: dict[int, list[int]] = {}
    for index, message in enumerate(earlier):
        turns.setdefault(message.turn, []).append(index)
    hulls = {
        turn: (min(earlier[i].start for i in found), max(earlier[i].stop for i in found))
        for turn, found in turns.items()
    }
    newest_first = sorted(turns, reverse=True)
    needed: list[int] = []
    for message in later:
        prefix = 0
        for turn in newest_first:
            if turn > message.turn or (turn == message.turn and not same_turn):
                continue
            low, high = hulls[turn]
            if low >= message.stop or high <= message.start:
                continue
            hits = [
                index
                for index in turns[turn]
                if earlier[index].start < message.stop and earlier[index].stop > message.start
            ]
            if hits:
                prefix = hits[-1] + 1
                break
        needed.append(prefix)
    return needed
