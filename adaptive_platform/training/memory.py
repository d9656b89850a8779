"""What to do when a micro-batch does not fit in memory: smaller ones, the same samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from adaptive_platform.data import MicroBatch, dealt, microbatch_sizes, positions_of
from adaptive_platform.errors import RunFailedError

__all__ = ["halved", "largest_of", "recut"]


def largest_of(
    world_size: int,
    cursor: int,
    count: int,
    bound: int,
    *,
    minimum: int,
    at_least: int,
    deal: tuple[int, ...] | None = None,
) -> int:
    """Samples of the largest micro-batch that any worker has in a step.

    Args:
        world_size: Workers.
        cursor: Positions of the epoch's order behind the step.
        count: Positions that the step takes.
        bound: Most samples of a micro-batch.
        minimum: Fewest samples that the model can train on.
        at_least: Micro-batches wanted where the share is large enough.
        deal: Who takes which position; all workers alike where None.
    """
    shares = [
        len(positions_of(rank, world_size, cursor, count, minimum, deal))
        for rank in range(world_size)
    ]
    return microbatch_sizes(max(shares), bound, minimum, at_least)[0]


def halved(largest: int, minimum: int) -> int:
    """The micro-batch to try after one of `largest` samples did not fit.

    Args:
        largest: Samples of the largest micro-batch that any worker had.
        minimum: Fewest samples that the model can train on.

    Raises:
        RunFailedError: There is nothing smaller.
    """
    if largest <= minimum:
        few = "one sample does" if largest == 1 else f"{largest} samples do"
        raise RunFailedError(
            f"memory: even {few} not fit beside the model and its optimizer. Use a smaller model "
            "or image_size, precision.dtype=bfloat16, an optimizer with less state, or devices "
            "with more memory. More workers do not help, as each holds the whole model."
        )
    return max(-(-largest // 2), minimum)


def recut(
    microbatches: Sequence[MicroBatch], largest: int, minimum: int, at_least: int
) -> list[MicroBatch]:
    """The same samples in the same order, cut as a run that knew `largest` would have.

    Args:
        microbatches: All of a worker's share of a step; may be none.
        largest: Most samples of a micro-batch.
        minimum: Fewest samples that the model can train on.
        at_least: Micro-batches wanted where the share is large enough.
    """
    if not microbatches:
        return []
    count = sum(len(m) for m in microbatches)
    sizes = microbatch_sizes(count, largest, minimum, at_least)
    # Back to the order of the share, then dealt to the larger number of micro-batches.
    shared = np.argsort(dealt(count, len(microbatches)))
    index = torch.from_numpy(shared[dealt(count, len(sizes))])
    inputs = torch.cat([m.inputs for m in microbatches])[index]
    targets = torch.cat([m.targets for m in microbatches])[index]
    ids = torch.cat([m.ids for m in microbatches])[index]
    return [
        replace(microbatches[0], inputs=i, targets=t, ids=n)
        for i, t, n in zip(inputs.split(sizes), targets.split(sizes), ids.split(sizes), strict=True)
    ]
