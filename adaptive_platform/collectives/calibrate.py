"""Measures reductions on the actual workers, and fits the cost model to what was measured."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch._C._distributed_c10d import PrefixStore

from adaptive_platform.collectives.cost import Link, Links, cost
from adaptive_platform.collectives.groups import Membership
from adaptive_platform.collectives.plan import Plan
from adaptive_platform.collectives.reducer import Reducer
from adaptive_platform.collectives.ring import RingConfig

__all__ = ["Timing", "fit_link", "measure_links", "time_reductions"]

_COUNTING_ROUNDS = Links(remote=Link(latency_seconds=1.0, bytes_per_second=1e300))
_COUNTING_BYTES = Links(remote=Link(latency_seconds=0.0, bytes_per_second=1.0))


@dataclass(frozen=True, slots=True)
class Timing:
    """How long one reduction took."""

    plan: Plan
    message_bytes: int
    seconds: float
    """Least over the repeats, of the slowest worker in each: what disturbs a link only adds."""


def time_reductions(
    reducer: Reducer, sizes_bytes: Sequence[int], repeats: int = 10, warmup: int = 2
) -> list[Timing]:
    """Time `reducer.start` for each size. All workers call it together and get the same answer.

    Args:
        reducer: With at least two workers for a meaningful answer.
        sizes_bytes: Message sizes; rounded down to whole float32 numbers.
        repeats: Timed reductions per size.
        warmup: Reductions before those.
    """
    found: list[Timing] = []
    for size in sizes_bytes:
        buffer = torch.zeros(size // 4, device=reducer.device)
        seconds: list[float] = []
        for _ in range(warmup + repeats):
            reducer.barrier()
            began = time.perf_counter()
            reducer.start(buffer).wait()
            mine = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
            seconds.append(max(each.item() for each in reducer.all_gather(mine)))
        found.append(Timing(reducer.plan_for(buffer.nbytes), buffer.nbytes, min(seconds[warmup:])))
    return found


def fit_link(timings: Sequence[Timing]) -> Link:
    """Latency and bandwidth of uniform links that explain the timings best, in relative error.

    Every cost is `rounds * latency + bytes of the busiest worker / bandwidth`, so this is a linear
    least-squares fit with two unknowns, neither of them negative.

    Raises:
        ValueError: Fewer than two different sizes, so that the two can't be told apart.
    """
    if len({timing.message_bytes for timing in timings}) < 2:
        raise ValueError("timings of at least two message sizes are needed")
    rows = [
        (
            cost(timing.plan, timing.message_bytes, _COUNTING_ROUNDS) / timing.seconds,
            cost(timing.plan, timing.message_bytes, _COUNTING_BYTES) / timing.seconds,
        )
        for timing in timings
    ]
    rounds_sq = sum(rounds * rounds for rounds, _ in rows)
    volume_sq = sum(volume * volume for _, volume in rows)
    mixed = sum(rounds * volume for rounds, volume in rows)
    rounds_sum, volume_sum = sum(r for r, _ in rows), sum(v for _, v in rows)
    determinant = rounds_sq * volume_sq - mixed * mixed
    latency = (rounds_sum * volume_sq - volume_sum * mixed) / determinant
    per_byte = (volume_sum * rounds_sq - rounds_sum * mixed) / determinant
    if latency < 0:
        latency, per_byte = 0.0, volume_sum / volume_sq
    elif per_byte <= 0:
        raise ValueError("larger messages did not take longer: repeat with larger ones")
    return Link(latency_seconds=latency, bytes_per_second=1 / per_byte)


def measure_links(
    membership: Membership,
    device: torch.device | str = "cpu",
    sizes_bytes: Sequence[int] = (2**14, 2**18, 2**22, 2**24),
    repeats: int = 10,
) -> Links:
    """Latency and bandwidth between machines and inside them, as these workers see them.

    The first worker of every machine forms one ring and the workers of each machine another, one
    kind after the other, so that neither disturbs the other. Between machines, the bandwidth of
    one pair of workers is taken for that of the network card.

    Args:
        membership: All workers call this together, with a generation that is not used yet.
        device: Where the messages live.
        sizes_bytes: Message sizes, at least two.
        repeats: Timed reductions per size.

    Returns:
        The same on all workers. Where all are on one machine, or each on its own, there is one
        kind of link only and `local` is left out.
    """
    names = membership.node_of_rank or ("one machine",) * membership.world_size
    members: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        members.setdefault(name, []).append(rank)
    firsts = [ranks[0] for ranks in members.values()]
    mine = members[names[membership.rank]]
    with Reducer(RingConfig(), membership, device) as everyone:

        def ring(label: str, ranks: Sequence[int]) -> Link | None:
            """Fit the ring of `ranks`; every worker learns the slowest answer of all rings."""
            link = None
            if membership.rank in ranks and len(ranks) > 1:
                part = Membership(
                    PrefixStore(f"links/{label}/{ranks[0]}", membership.store),
                    ranks.index(membership.rank),
                    len(ranks),
                    membership.generation,
                )
                with Reducer(RingConfig(), part, device) as reducer:
                    link = fit_link(time_reductions(reducer, sizes_bytes, repeats))
            found = [each for each in everyone.all_gather_object(link) if each is not None]
            return min(found, key=lambda each: each.bytes_per_second, default=None)

        remote, local = ring("remote", firsts), ring("local", mine)
    if remote is None:
        assert local is not None, "one worker has no links"
        return Links(remote=local)
    return Links(remote=remote, local=local)
