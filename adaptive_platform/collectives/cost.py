"""What a plan costs on given links: latency, bandwidth, and machines that share a network card.

The α–β model: a message of n bytes takes `latency + n / bandwidth`. Messages of one round run side
by side, rounds one after the other. Workers of one machine share its card for what leaves the
machine, and talk to each other without it. Tens of thousands of workers are fine: a ring is priced
as one round times their number.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain

from pydantic import Field

from adaptive_platform.collectives.plan import Phase, Plan
from adaptive_platform.collectives.schedules import Algorithm, Op
from adaptive_platform.settings import Settings

__all__ = ["Link", "Links", "cheapest", "cost", "exposed_seconds"]

Messages = list[tuple[int, int, float]]
Wave = tuple[int, Messages]
"""How often a round repeats, and its messages: source, target, fraction of the buffer."""


class Link(Settings):
    """A connection of one worker or one machine, as fast in both directions at once."""

    latency_seconds: float = Field(ge=0)
    """α: time that a message takes however short it is, in seconds."""
    bytes_per_second: float = Field(gt=0)
    """1/β: bandwidth in bytes per second."""


class Links(Settings):
    """The network of a cluster."""

    remote: Link
    """From machine to machine; the bandwidth is shared by all workers of a machine."""
    local: Link | None = None
    """Between workers of one machine, each with this bandwidth. Left out: like `remote`."""


def cost(
    plan: Plan, message_bytes: float, links: Links, node_of_rank: Sequence[str] | None = None
) -> float:
    """Seconds that one all-reduce of `message_bytes` takes.

    Args:
        plan: What is done.
        message_bytes: Size of the buffer on each worker.
        links: Speeds.
        node_of_rank: Machine of each rank; left out, every worker has a machine to itself.

    What is left out: the time to add numbers, contention inside the network, stragglers, and the
    overlap of neighbouring rounds by segmenting.
    """
    held = [1.0] * plan.world_size
    stack: list[list[float]] = []
    total = 0.0
    for phase in plan.phases:
        if phase.op is Op.ALL_GATHER:
            held = stack.pop()
        for repeats, messages in _waves(phase, held):
            total += repeats * _round_seconds(messages, message_bytes, links, node_of_rank)
        if phase.op is Op.REDUCE_SCATTER:
            stack.append(held)
            held = list(held)
            for group in phase.groups:
                for rank in group:
                    held[rank] /= len(group)
    return total


def cheapest(
    plans: Mapping[str, Plan],
    message_bytes: float,
    links: Links,
    node_of_rank: Sequence[str] | None = None,
) -> str:
    """Name of the plan with the lowest cost; the first of equals."""
    return min(plans, key=lambda name: cost(plans[name], message_bytes, links, node_of_rank))


def exposed_seconds(
    ready_seconds: Sequence[float], bucket_seconds: Sequence[float], backward_seconds: float
) -> float:
    """Reduction time that backward does not hide (Das et al. 2016, arXiv 1602.06709, section 3).

    Buckets are reduced one after the other, each not before its gradients exist.

    Args:
        ready_seconds: When each bucket is full, in launch order, from the start of backward.
        bucket_seconds: How long the reduction of each takes.
        backward_seconds: Length of backward.
    """
    free = 0.0
    for ready, seconds in zip(ready_seconds, bucket_seconds, strict=True):
        free = max(free, ready) + seconds
    return max(0.0, free - backward_seconds)


def _round_seconds(
    messages: Messages,
    message_bytes: float,
    links: Links,
    node_of_rank: Sequence[str] | None,
) -> float:
    leaving: defaultdict[str | int, float] = defaultdict(float)
    arriving: defaultdict[str | int, float] = defaultdict(float)
    sent: defaultdict[str | int, float] = defaultdict(float)
    received: defaultdict[str | int, float] = defaultdict(float)
    for source, target, fraction in messages:
        here: str | int = source if node_of_rank is None else node_of_rank[source]
        there: str | int = target if node_of_rank is None else node_of_rank[target]
        if here == there:
            sent[source] += fraction
            received[target] += fraction
        else:
            leaving[here] += fraction
            arriving[there] += fraction
    busiest_local = max(chain(sent.values(), received.values()), default=None)
    busiest_remote = max(chain(leaving.values(), arriving.values()), default=None)
    return max(
        _link_seconds(links.local or links.remote, message_bytes, busiest_local),
        _link_seconds(links.remote, message_bytes, busiest_remote),
    )


def _link_seconds(link: Link, message_bytes: float, fraction: float | None) -> float:
    if fraction is None:
        return 0.0
    return link.latency_seconds + fraction * message_bytes / link.bytes_per_second


def _waves(phase: Phase, held: Sequence[float]) -> Iterator[Wave]:
    """The rounds of a phase. `held` is the fraction of the buffer each rank works on."""
    for make in _MAKERS[phase.op, phase.algorithm]:
        yield from make(phase, held)


def _ring_pass(phase: Phase, held: Sequence[float]) -> Iterator[Wave]:
    before = 1
    for size in sorted({len(group) for group in phase.groups}):
        # Every group does these rounds that has not finished yet.
        yield (
            size - before,
            [
                (rank, group[(place + 1) % len(group)], held[rank] / len(group))
                for group in phase.groups
                if len(group) >= size
                for place, rank in enumerate(group)
            ],
        )
        before = size


def _ring_pass_both_ways(phase: Phase, held: Sequence[float]) -> Iterator[Wave]:
    for repeats, messages in _ring_pass(phase, held):
        yield (
            repeats,
            [
                pair
                for source, target, fraction in messages
                for pair in ((source, target, fraction / 2), (target, source, fraction / 2))
            ],
        )


def _chunks_to_first(phase: Phase, held: Sequence[float]) -> Iterator[Wave]:
    for turn in range(1, max(len(group) for group in phase.groups)):
        yield (
            1,
            [
                (group[turn], group[0], held[group[0]] / len(group))
                for group in phase.groups
                if len(group) > turn
            ],
        )


def _buffers_to_first(phase: Phase, held: Sequence[float]) -> Iterator[Wave]:
    for turn in range(1, max(len(group) for group in phase.groups)):
        yield (
            1,
            [
                (group[turn], group[0], held[group[0]])
                for group in phase.groups
                if len(group) > turn
            ],
        )


def _tree_levels(phase: Phase, held: Sequence[float]) -> Iterator[Wave]:
    reach, longest = 1, max(len(group) for group in phase.groups)
    while reach < longest:
        yield (
            1,
            [
                (group[place + reach], group[place], held[group[place]])
                for group in phase.groups
                for place in range(0, len(group) - reach, 2 * reach)
            ],
        )
        reach *= 2


def _halving_levels(phase: Phase, held: Sequence[float]) -> Iterator[Wave]:
    half, (size,) = max(map(len, phase.groups)) // 2, {len(group) for group in phase.groups}
    while half:
        yield (
            1,
            [
                (rank, group[place ^ half], held[rank] * half / size)
                for group in phase.groups
                for place, rank in enumerate(group)
            ],
        )
        half //= 2


_MAKERS: dict[
    tuple[Op, Algorithm], tuple[Callable[[Phase, Sequence[float]], Iterator[Wave]], ...]
] = {
    (Op.ALL_REDUCE, Algorithm.RING): (_ring_pass, _ring_pass),
    (Op.REDUCE_SCATTER, Algorithm.RING): (_ring_pass,),
    (Op.ALL_GATHER, Algorithm.RING): (_ring_pass,),
    # The way back costs what the way there costs: links are as fast in both directions.
    (Op.REDUCE, Algorithm.RING): (_ring_pass, _chunks_to_first),
    (Op.BROADCAST, Algorithm.RING): (_chunks_to_first, _ring_pass),
    (Op.REDUCE, Algorithm.TREE): (_tree_levels,),
    (Op.BROADCAST, Algorithm.TREE): (_tree_levels,),
    (Op.REDUCE, Algorithm.STAR): (_buffers_to_first,),
    (Op.BROADCAST, Algorithm.STAR): (_buffers_to_first,),
    (Op.ALL_REDUCE, Algorithm.BOTH_WAYS): (_ring_pass_both_ways, _ring_pass_both_ways),
    (Op.REDUCE_SCATTER, Algorithm.BOTH_WAYS): (_ring_pass_both_ways,),
    (Op.ALL_GATHER, Algorithm.BOTH_WAYS): (_ring_pass_both_ways,),
    (Op.REDUCE_SCATTER, Algorithm.HALVING): (_halving_levels,),
    (Op.ALL_GATHER, Algorithm.HALVING): (_halving_levels,),
    (Op.ALL_REDUCE, Algorithm.HALVING): (_halving_levels, _halving_levels),
}
