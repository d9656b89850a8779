"""Programs of segment-sized actions: no deadlock, the sum, nothing overwritten too early."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptive_platform.collectives.pipeline import Program, Step, compile_program
from adaptive_platform.collectives.schedules import (
    _MAKERS,
    Algorithm,
    Op,
    chunk_bounds,
    piece_bounds,
    rounds_of,
)


def run_programs(programs: list[Program], buffers: list[torch.Tensor], order: list[int]) -> None:
    """Advance one worker at a time, as `order` says. Sends complete only when they are received.

    The payload is read at the last moment, when the receiver takes it: a program that changes a
    buffer before its send has ended sends the wrong numbers.
    """
    wire: dict[tuple[int, int, int], tuple[int, int]] = {}
    taken: set[tuple[int, int, int]] = set()
    posted: list[set[int]] = [set() for _ in programs]
    todo = [deque(program.actions) for program in programs]

    def advance(me: int) -> bool:
        if not todo[me]:
            return False
        action, program = todo[me][0], programs[me]
        if action.step is Step.SEND:
            message = program.sends[action.index]
            wire[me, message.peer, message.tag] = (message.start, message.stop)
        elif action.step is Step.RECEIVE:
            posted[me].add(action.index)
            assert len(posted[me]) <= program.in_flight
        elif action.step is Step.AWAIT_RECEIVED:
            message = program.receives[action.index]
            key = (message.peer, me, message.tag)
            if key not in wire:
                return False
            assert action.index in posted[me]
            posted[me].discard(action.index)
            start, stop = wire.pop(key)
            taken.add(key)
            assert (start, stop) == (message.start, message.stop)
            payload = buffers[message.peer][start:stop].clone()
            if message.add:
                buffers[me][start:stop].add_(payload)
            else:
                buffers[me][start:stop].copy_(payload)
        else:
            message = program.sends[action.index]
            if (me, message.peer, message.tag) not in taken:
                return False
        todo[me].popleft()
        return True

    turn = 0
    while any(todo):
        start = order[turn % len(order)] % len(programs)
        turn += 1
        moved = any(advance((start + k) % len(programs)) for k in range(len(programs)))
        assert moved, f"deadlock with {[len(left) for left in todo]} actions left"
    assert not wire


@settings(max_examples=150, deadline=None)
@given(
    maker=st.sampled_from(sorted(_MAKERS)),
    size=st.integers(2, 9),
    length=st.integers(0, 40),
    segment=st.integers(1, 12),
    in_flight=st.integers(1, 5),
    order=st.lists(st.integers(0, 8), min_size=1, max_size=12),
)
def test_every_schedule_in_any_order_of_progress(
    maker: tuple[Op, Algorithm],
    size: int,
    length: int,
    segment: int,
    in_flight: int,
    order: list[int],
) -> None:
    op, algorithm = maker
    if algorithm is Algorithm.HALVING:
        size = 1 << (size.bit_length() - 1)
    bounds = chunk_bounds(3, 3 + length, size)
    pieces = piece_bounds(algorithm, 3, 3 + length, size)
    programs = [
        compile_program(rounds_of(op, algorithm, size, place), pieces, segment, in_flight)
        for place in range(size)
    ]
    base = torch.arange(3 + length + 2) + 1
    buffers = [base * 10**place for place in range(size)]
    inputs = [buffer.clone() for buffer in buffers]
    total = torch.stack(inputs).sum(0)

    run_programs(programs, buffers, order)

    for place, (buffer, given_) in enumerate(zip(buffers, inputs, strict=True)):
        assert torch.equal(buffer[:3], given_[:3]), "written before the span"
        assert torch.equal(buffer[3 + length :], given_[3 + length :]), "written behind the span"
        inside = slice(3, 3 + length)
        if op is Op.ALL_REDUCE or (op is Op.REDUCE and place == 0):
            assert torch.equal(buffer[inside], total[inside])
        elif op is Op.BROADCAST:
            assert torch.equal(buffer[inside], inputs[0][inside])
        elif op is Op.REDUCE_SCATTER:
            own = slice(bounds[place], bounds[place + 1])
            assert torch.equal(buffer[own], total[own])
        elif op is Op.ALL_GATHER:
            for peer in range(size):
                part = slice(bounds[peer], bounds[peer + 1])
                assert torch.equal(buffer[part], inputs[peer][part])


def test_a_segment_is_passed_on_before_the_next_has_come() -> None:
    rounds = rounds_of(Op.REDUCE_SCATTER, Algorithm.RING, 4, 0)
    program = compile_program(rounds, chunk_bounds(0, 64, 4), segment=4, in_flight=2)
    steps = [(action.step, action.index) for action in program.actions]
    first_round = 4
    assert steps.index((Step.SEND, first_round)) < steps.index((Step.AWAIT_RECEIVED, 1))


def test_unknown_combinations_are_refused() -> None:
    with pytest.raises(ValueError, match="no tree form of all_gather"):
        rounds_of(Op.ALL_GATHER, Algorithm.TREE, 4, 0)
    with pytest.raises(ValueError, match="power of two"):
        rounds_of(Op.REDUCE_SCATTER, Algorithm.HALVING, 6, 0)
