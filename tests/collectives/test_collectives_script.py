"""Whole reductions as lists of instructions: the sum, on all plans, in any order of progress."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptive_platform.collectives import ReducerConfig, TorusConfig
from adaptive_platform.collectives.plan import Plan
from adaptive_platform.collectives.script import Act, Instruction, Script, write_script
from adaptive_platform.settings import variants_of

KINDS = sorted(variants_of(ReducerConfig))
IN_FLIGHT = 3


def play(plan: Plan, scripts: list[Script], buffers: list[torch.Tensor], order: list[int]) -> None:
    """Advance one worker at a time, as `order` says.

    A message is read when its receiver takes it, which is as late as can be; one that lands in
    place is taken as soon as it is sent, which is as early as can be. The backend's own sum
    happens once all members of the group have begun it.
    """
    workers = range(plan.world_size)
    todo = [deque(script.instructions) for script in scripts]
    sent: dict[tuple[int, int, int, int], Instruction] = {}
    taken: set[tuple[int, int, int, int]] = set()
    landing: dict[tuple[int, int, int, int], Instruction] = {}
    slots: list[dict[int, int]] = [{} for _ in workers]
    begun: dict[tuple[int, int, int], dict[int, Instruction]] = {}
    num_begun: dict[tuple[int, int], int] = {}
    summed: set[tuple[int, int]] = set()

    def group_of(rank: int, phase: int) -> tuple[int, tuple[int, ...]]:
        place = plan.phases[phase].place(rank)
        assert place is not None
        return place[1], plan.phases[phase].groups[place[0]]

    def key_of(rank: int, each: Instruction, outgoing: bool) -> tuple[int, int, int, int]:
        _, group = group_of(rank, each.phase)
        peer = group[each.peer]
        # Messages of all phases between two workers go through the same connection.
        name = hash(tuple(group))
        return (rank, peer, name, each.tag) if outgoing else (peer, rank, name, each.tag)

    def land(key: tuple[int, int, int, int], each: Instruction) -> None:
        source = sent.pop(key)
        assert source.stop - source.start == each.stop - each.start
        buffers[key[1]][each.start : each.stop] = buffers[key[0]][source.start : source.stop]
        taken.add(key)

    def advance(rank: int) -> bool:
        if not todo[rank]:
            return False
        each = todo[rank][0]
        if each.act is Act.SEND:
            key = key_of(rank, each, True)
            assert key not in sent
            assert key not in taken, "a tag is used twice"
            sent[key] = each
            if key in landing:
                land(key, landing.pop(key))
        elif each.act is Act.RECEIVE:
            key = key_of(rank, each, False)
            if each.slot >= 0:
                assert each.slot not in slots[rank], "a slot is still in use"
                slots[rank][each.slot] = each.work
            elif key in sent:
                land(key, each)
            else:
                landing[key] = each
        elif each.act in (Act.AWAIT_RECEIVED, Act.ADD_RECEIVED):
            key = key_of(rank, each, False)
            if each.slot < 0:
                if key not in taken:
                    return False
            else:
                if key not in sent:
                    return False
                assert slots[rank].pop(each.slot) == each.work
                source, own = sent.pop(key), buffers[rank][each.start : each.stop]
                payload = buffers[key[0]][source.start : source.stop].clone()
                own.copy_(own + payload if each.act is Act.ADD_RECEIVED else payload)
                taken.add(key)
        elif each.act is Act.AWAIT_SENT:
            if key_of(rank, each, True) not in taken:
                return False
        elif each.act is Act.BEGIN_SUM:
            _, group = group_of(rank, each.phase)
            number = num_begun[rank, each.phase] = num_begun.get((rank, each.phase), 0) + 1
            members = begun.setdefault((each.phase, hash(group), number), {})
            members[rank] = each
            if len(members) == len(group):
                total = sum(buffers[r][i.start : i.stop] for r, i in members.items())
                for r, i in members.items():
                    buffers[r][i.start : i.stop] = total
                    summed.add((r, i.work))
        elif (rank, each.work) not in summed:
            return False
        todo[rank].popleft()
        return True

    turn = 0
    while any(todo):
        first = order[turn % len(order)] % plan.world_size
        turn += 1
        moved = any(advance((first + k) % plan.world_size) for k in workers)
        assert moved, f"deadlock with {[len(left) for left in todo]} instructions left"
    assert not sent
    assert not landing


@settings(max_examples=200, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    world_size=st.integers(2, 9),
    length=st.integers(0, 60),
    segment=st.integers(1, 9),
    num_slices=st.integers(1, 4),
    exact=st.booleans(),
    order=st.lists(st.integers(0, 8), min_size=1, max_size=12),
)
def test_everyone_ends_with_the_sum(
    kind: str,
    world_size: int,
    length: int,
    segment: int,
    num_slices: int,
    exact: bool,
    order: list[int],
) -> None:
    plan = variants_of(ReducerConfig)[kind](kind=kind).plan(world_size)
    scripts = [
        write_script(
            plan,
            rank,
            length,
            segment=segment,
            in_flight=IN_FLIGHT,
            num_slices=num_slices,
            exact=exact,
        )
        for rank in range(world_size)
    ]
    buffers = [(torch.arange(length) + 1) * 10**rank for rank in range(world_size)]
    total = torch.stack(buffers).sum(0)

    play(plan, scripts, buffers, order)

    for buffer in buffers:
        assert torch.equal(buffer, total)


def test_results_can_arrive_from_the_beginning() -> None:
    """Receivers that are ready save a question and an answer before each message."""
    plan = TorusConfig(grid=(2, 2)).plan(4)
    script = write_script(plan, 0, 100, segment=100, in_flight=4)
    acts = [each.act for each in script.instructions]
    assert acts[:3] == [Act.RECEIVE, Act.RECEIVE, Act.SEND]
    assert [each.slot for each in script.instructions[:2]] == [-1, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_with_a_narrower_type_nothing_is_summed_by_the_backend(kind: str) -> None:
    plan = variants_of(ReducerConfig)[kind](kind=kind).plan(4)
    script = write_script(plan, 0, 100, segment=100, in_flight=4, exact=False)
    acts = {each.act for each in script.instructions}
    assert Act.BEGIN_SUM not in acts
    assert all(each.slot >= 0 for each in script.instructions if each.act is Act.RECEIVE)
