"""Who takes what: slices of an epoch, workers' shares and micro-batch sizes, as pure integers.

`minimum` is everywhere the smallest micro-batch the model can train on: 2 with batch norm, else 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from adaptive_platform.errors import DataError, UserError

__all__ = ["deal_of", "dealt", "microbatch_sizes", "next_slice", "owned", "positions_of"]


def next_slice(cursor: int, batch: int, size: int, minimum: int) -> int:
    """How many positions of the epoch's order the next step takes.

    The last batch of an epoch is used with its true size. Where fewer than `minimum` samples would
    be left over for it, the step before takes them too and is larger by at most `minimum - 1`.

    Args:
        cursor: Positions behind us, in [0, size).
        batch: Global batch asked for, >= minimum.
        size: Samples in one epoch.
        minimum: Smallest micro-batch.

    Raises:
        DataError: The dataset is smaller than one micro-batch.
        UserError: The batch is smaller than one micro-batch.
    """
    if size < minimum:
        raise DataError(
            f"data: {size} training samples, but the model needs at least {minimum} in a batch"
            f"{_because(minimum)}. Give it more data."
        )
    if batch < minimum:
        raise UserError(
            f"batch: a global batch of {batch} is too small, the model needs at least {minimum}"
            f"{_because(minimum)}. Raise it."
        )
    remaining = size - cursor
    if remaining < minimum:
        raise AssertionError(f"cursor {cursor} of {size} was not reached by slices of >= {minimum}")
    take = min(batch, remaining)
    return remaining if remaining - take < minimum else take


def deal_of(parts: Sequence[int]) -> tuple[int, ...]:
    """Who takes which position: position `p` belongs to worker `deal[p % len(deal)]`.

    Each worker's positions are spread evenly, so that every slice is close to the shares that were
    asked for. Equal parts give `(0, 1, ..., n - 1)`.

    Args:
        parts: Of each worker, by rank, >= 1.
    """
    total = sum(parts) if len(set(parts)) > 1 else len(parts)
    weights = list(parts) if len(set(parts)) > 1 else [1] * len(parts)
    owed = [0] * len(parts)
    deal = []
    for _ in range(total):
        owed = [have + weight for have, weight in zip(owed, weights, strict=True)]
        taker = owed.index(max(owed))
        owed[taker] -= total
        deal.append(taker)
    return tuple(deal)


def owned(positions: NDArray[np.int64], rank: int, deal: tuple[int, ...]) -> NDArray[np.int64]:
    """Those positions that belong to a worker."""
    return positions[np.array(deal)[positions % len(deal)] == rank]


def positions_of(
    rank: int,
    world_size: int,
    cursor: int,
    count: int,
    minimum: int,
    deal: tuple[int, ...] | None = None,
) -> NDArray[np.int64]:
    """Absolute positions of the epoch's order that one worker takes of [cursor, cursor + count).

    Normally worker `r` takes the positions `p` with `p % world_size == r`. The worker's stream of
    samples then does not depend on the batch size, so what it decoded ahead stays right when the
    batch changes. Where that would give some worker between 1 and `minimum - 1` samples, only the
    first `count // minimum` workers take part, by `p % active == r`, and the others take none.

    Shares are disjoint and complete, each is 0 or >= minimum, and those that take part differ by
    at most one sample.

    With a `deal`, worker `r` takes the positions that it gives to `r`; where that would leave some
    worker between 1 and `minimum - 1` samples, the step is shared out as without.

    Returns:
        Ascending positions, possibly none.

    Raises:
        AssertionError: `count` is below `minimum`, which `next_slice` never returns.
    """
    if count < minimum:
        raise AssertionError(f"a slice of {count} samples is below the minimum of {minimum}")
    if deal is not None:
        everyone = np.arange(cursor, cursor + count, dtype=np.int64)
        owners = np.array(deal)[everyone % len(deal)]
        sizes = np.bincount(owners, minlength=world_size)
        if not np.any((sizes > 0) & (sizes < minimum)):
            return everyone[owners == rank]
    smallest = count // world_size or 1
    active = world_size if smallest >= minimum else min(world_size, count // minimum)
    if rank >= active:
        return np.empty(0, dtype=np.int64)
    first = cursor + (rank - cursor) % active
    return np.arange(first, cursor + count, active, dtype=np.int64)


def microbatch_sizes(
    share: int, microbatch: int, minimum: int, at_least: int = 1
) -> tuple[int, ...]:
    """Near-equal micro-batch sizes that sum to one worker's share of a step.

    As few as possible with each <= microbatch; but no size goes below `minimum`, which wins where
    the two collide (3 samples with microbatch 2 and minimum 2 are one micro-batch of 3).

    Args:
        share: Samples of this worker in this step; 0 gives no micro-batch.
        microbatch: Largest micro-batch that fits the device, >= 1.
        minimum: Smallest micro-batch; `share` is 0 or at least this.
        at_least: Pieces wanted where the share is large enough; two or more let a single worker
            see gradient noise.

    Raises:
        AssertionError: `share` is between 1 and `minimum - 1`.
    """
    if share == 0:
        return ()
    if share < minimum:
        raise AssertionError(f"a share of {share} samples is below the minimum of {minimum}")
    wanted = max(-(-share // microbatch), at_least)
    pieces = min(wanted, share // minimum)
    size, larger = divmod(share, pieces)
    return (size + 1,) * larger + (size,) * (pieces - larger)


def dealt(share: int, pieces: int) -> NDArray[np.int64]:
    """Order in which a worker's samples fill its micro-batches: dealt out like cards.

    Sample i goes to micro-batch `i % pieces`. With equal shares, the sets of samples are then those
    of `p % (world_size * pieces)`, whoever runs them: 4 workers with one micro-batch each and one
    worker with four measure the same gradient noise (field case F02).

    Returns:
        Indices into the share, micro-batch after micro-batch, of `microbatch_sizes` each.
    """
    return np.concatenate([np.arange(j, share, pieces, dtype=np.int64) for j in range(pieces)])


def _because(minimum: int) -> str:
    return " (batch norm can't train on fewer)" if minimum > 1 else ""
