"""What one worker of a group sends and receives, round by round, as data.

Positions are places in the group, chunks are equal parts of what the group works on: chunk i of k
is `[i/k, (i+1)/k)`. Every algorithm below leaves the worker at position i of a reduce-scatter with
chunk i, so that phases can be combined freely.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

__all__ = ["Algorithm", "Op", "Round", "Transfer", "chunk_bounds", "piece_bounds", "rounds_of"]


class Op(str, Enum):
    """What a group does with the buffers of its workers. Sums, always."""

    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    REDUCE = "reduce"
    """Position 0 ends with the sum; what the others hold is then undefined."""
    BROADCAST = "broadcast"
    """Everyone ends with what position 0 held."""


class Algorithm(str, Enum):
    """How a group does it."""

    RING = "ring"
    """Neighbour to neighbour, chunk by chunk: k - 1 rounds for each half of an all-reduce."""
    TREE = "tree"
    """Binomial tree, the whole message on every level (FireCaffe, arXiv 1511.00175)."""
    STAR = "star"
    """Everyone talks to position 0, one after the other: a parameter server's link."""
    BOTH_WAYS = "both_ways"
    """Two rings at once: one half of each chunk goes one way round, the other half the other way
    (after Ying et al. 2018, 1811.06992, who keep all links of a torus busy)."""
    HALVING = "halving"
    """Recursive halving and doubling between partners; the group size is a power of two."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """Pieces `[start, stop)` to or from the worker at position `peer`; see `piece_bounds`."""

    peer: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Round:
    """One turn of one worker. What is sent was complete before the turn began."""

    send: Transfer | None
    receive: Transfer | None
    add: bool
    """Received chunks are added to the buffer; otherwise they replace what is there."""


def chunk_bounds(start: int, stop: int, parts: int) -> tuple[int, ...]:
    """`parts + 1` boundaries that cut `[start, stop)` into parts differing by at most one."""
    length = stop - start
    return tuple(start + length * index // parts for index in range(parts + 1))


def piece_bounds(algorithm: Algorithm, start: int, stop: int, size: int) -> tuple[int, ...]:
    """Boundaries of what an algorithm sends at a time in a group: chunks, or halves of chunks."""
    return chunk_bounds(start, stop, 2 * size if algorithm is Algorithm.BOTH_WAYS else size)


@lru_cache(maxsize=4096)
def rounds_of(op: Op, algorithm: Algorithm, size: int, position: int) -> tuple[Round, ...]:
    """Turns of the worker at `position` in a group of `size` workers.

    Raises:
        ValueError: The algorithm does not know the operation or the group size.
    """
    if size == 1:
        return ()
    if (op, algorithm) not in _MAKERS:
        raise ValueError(f"there is no {algorithm.value} form of {op.value}")
    if algorithm is Algorithm.HALVING and size & (size - 1):
        raise ValueError(f"halving needs a power of two, not a group of {size}")
    return tuple(turn for make in _MAKERS[op, algorithm] for turn in make(size, position))


def _ring_scatter(size: int, position: int) -> Iterator[Round]:
    after, before = (position + 1) % size, (position - 1) % size
    for turn in range(size - 1):
        sent, received = (position - 1 - turn) % size, (position - 2 - turn) % size
        yield Round(
            Transfer(after, sent, sent + 1), Transfer(before, received, received + 1), add=True
        )


def _ring_gather(size: int, position: int) -> Iterator[Round]:
    after, before = (position + 1) % size, (position - 1) % size
    for turn in range(size - 1):
        sent, received = (position - turn) % size, (position - 1 - turn) % size
        yield Round(
            Transfer(after, sent, sent + 1), Transfer(before, received, received + 1), add=False
        )


def _both_ways(
    one_way: Callable[[int, int], Iterator[Round]],
) -> Callable[[int, int], Iterator[Round]]:
    """Its turns with first halves, each followed by the mirrored turn with second halves.

    Seen in a mirror, position p is position -p and the ring runs the other way; so chunks are
    mirrored too, and those that end at -p end at p.
    """

    def moved(transfer: Transfer | None, size: int, *, mirrored: bool) -> Transfer | None:
        if transfer is None:
            return None
        peer, chunk = transfer.peer, transfer.start
        if mirrored:
            peer, chunk = -peer % size, -chunk % size
        return Transfer(peer, 2 * chunk + mirrored, 2 * chunk + mirrored + 1)

    def make(size: int, position: int) -> Iterator[Round]:
        turns = zip(one_way(size, position), one_way(size, -position % size), strict=True)
        for pair in turns:
            for mirrored, turn in zip((False, True), pair, strict=True):
                yield Round(
                    moved(turn.send, size, mirrored=mirrored),
                    moved(turn.receive, size, mirrored=mirrored),
                    turn.add,
                )

    return make


def _gather_to_root(size: int, position: int) -> Iterator[Round]:
    for turn in range(1, size):
        if position == 0:
            yield Round(None, Transfer(turn, turn, turn + 1), add=False)
        else:
            yield Round(Transfer(0, turn, turn + 1) if turn == position else None, None, add=False)


def _scatter_from_root(size: int, position: int) -> Iterator[Round]:
    for turn in range(1, size):
        if position == 0:
            yield Round(Transfer(turn, turn, turn + 1), None, add=False)
        else:
            yield Round(None, Transfer(0, turn, turn + 1) if turn == position else None, add=False)


def _tree_reduce(size: int, position: int) -> Iterator[Round]:
    reach = 1
    while reach < size:
        send = receive = None
        if position % (2 * reach) == reach:
            send = Transfer(position - reach, 0, size)
        elif position % (2 * reach) == 0 and position + reach < size:
            receive = Transfer(position + reach, 0, size)
        yield Round(send, receive, add=True)
        reach *= 2


def _reversed(turns: Iterator[Round]) -> Iterator[Round]:
    for turn in reversed(list(turns)):
        yield Round(turn.receive, turn.send, add=False)


def _tree_broadcast(size: int, position: int) -> Iterator[Round]:
    return _reversed(_tree_reduce(size, position))


def _star_reduce(size: int, position: int) -> Iterator[Round]:
    for turn in range(1, size):
        if position == 0:
            yield Round(None, Transfer(turn, 0, size), add=True)
        else:
            yield Round(Transfer(0, 0, size) if turn == position else None, None, add=True)


def _star_broadcast(size: int, position: int) -> Iterator[Round]:
    return _reversed(_star_reduce(size, position))


def _halving_scatter(size: int, position: int) -> Iterator[Round]:
    low, high = 0, size
    while high - low > 1:
        middle, half = (low + high) // 2, (high - low) // 2
        if position < middle:
            kept, given, peer = (low, middle), (middle, high), position + half
        else:
            kept, given, peer = (middle, high), (low, middle), position - half
        yield Round(Transfer(peer, *given), Transfer(peer, *kept), add=True)
        low, high = kept


def _doubling_gather(size: int, position: int) -> Iterator[Round]:
    return _reversed(_halving_scatter(size, position))


_MAKERS = {
    (Op.ALL_REDUCE, Algorithm.RING): (_ring_scatter, _ring_gather),
    (Op.REDUCE_SCATTER, Algorithm.RING): (_ring_scatter,),
    (Op.ALL_GATHER, Algorithm.RING): (_ring_gather,),
    (Op.REDUCE, Algorithm.RING): (_ring_scatter, _gather_to_root),
    (Op.BROADCAST, Algorithm.RING): (_scatter_from_root, _ring_gather),
    (Op.REDUCE, Algorithm.TREE): (_tree_reduce,),
    (Op.BROADCAST, Algorithm.TREE): (_tree_broadcast,),
    (Op.REDUCE, Algorithm.STAR): (_star_reduce,),
    (Op.BROADCAST, Algorithm.STAR): (_star_broadcast,),
    (Op.ALL_REDUCE, Algorithm.BOTH_WAYS): (_both_ways(_ring_scatter), _both_ways(_ring_gather)),
    (Op.REDUCE_SCATTER, Algorithm.BOTH_WAYS): (_both_ways(_ring_scatter),),
    (Op.ALL_GATHER, Algorithm.BOTH_WAYS): (_both_ways(_ring_gather),),
    (Op.REDUCE_SCATTER, Algorithm.HALVING): (_halving_scatter,),
    (Op.ALL_GATHER, Algorithm.HALVING): (_doubling_gather,),
    (Op.ALL_REDUCE, Algorithm.HALVING): (_halving_scatter, _doubling_gather),
}
