"""Executes a plan on plain vectors, without a process: what property tests and studies run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from adaptive_platform.collectives.plan import Phase, Plan, Span
from adaptive_platform.collectives.schedules import Algorithm, piece_bounds, rounds_of

__all__ = ["Simulation", "simulate"]


@dataclass(frozen=True, slots=True)
class Simulation:
    """What every worker ended with and what it cost."""

    results: tuple[torch.Tensor, ...]
    """The buffer of each rank."""
    elements_sent: tuple[int, ...]
    """Elements that each rank put on the wire."""
    rounds: int
    """Message rounds one after the other, the number of latencies paid."""


def simulate(plan: Plan, vectors: Sequence[torch.Tensor]) -> Simulation:
    """Run `plan` on one vector per rank.

    Args:
        plan: What to do.
        vectors: One 1-D tensor per rank, all of one length; they are not changed.

    Raises:
        ValueError: Wrong number of vectors, or the lengths differ.
        AssertionError: A message is sent that nobody expects, or expected and never sent.
    """
    if len(vectors) != plan.world_size or len({len(vector) for vector in vectors}) != 1:
        raise ValueError(f"{plan.world_size} vectors of one length are needed")
    buffers = [vector.clone() for vector in vectors]
    sent = [0] * plan.world_size
    spans = [plan.spans(rank, len(vectors[0])) for rank in range(plan.world_size)]
    rounds = 0
    for index, phase in enumerate(plan.phases):
        longest = 0
        for group in phase.groups:
            shared = {spans[rank][index] for rank in group}
            assert len(shared) == 1, f"{group} do not work on one part: {shared}"
            longest = max(longest, _run_group(phase, group, shared.pop(), buffers, sent))
        rounds += longest
    return Simulation(tuple(buffers), tuple(sent), rounds)


def _run_group(
    phase: Phase,
    group: tuple[int, ...],
    span: Span,
    buffers: list[torch.Tensor],
    sent: list[int],
) -> int:
    size = len(group)
    bounds = piece_bounds(phase.algorithm, span.start, span.stop, size)
    programs = [rounds_of(phase.op, phase.algorithm, size, place) for place in range(size)]
    for turns in zip(*programs, strict=True):
        wire: dict[tuple[int, int], tuple[int, int, torch.Tensor]] = {}
        for place, turn in enumerate(turns):
            if turn.send is not None:
                start, stop = bounds[turn.send.start], bounds[turn.send.stop]
                payload = buffers[group[place]][start:stop].clone()
                wire[place, turn.send.peer] = (start, stop, payload)
                sent[group[place]] += stop - start
        for place, turn in enumerate(turns):
            if turn.receive is not None:
                start, stop, payload = wire.pop((turn.receive.peer, place))
                expected = (bounds[turn.receive.start], bounds[turn.receive.stop])
                assert (start, stop) == expected, f"{(start, stop)} sent, {expected} expected"
                target = buffers[group[place]][start:stop]
                if turn.add:
                    target.add_(payload)
                else:
                    target.copy_(payload)
        assert not wire, f"messages that nobody takes: {sorted(wire)}"
    # Both ways round go on at the same time.
    return len(programs[0]) // (2 if phase.algorithm is Algorithm.BOTH_WAYS else 1)
