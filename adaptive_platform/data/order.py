"""The global order: one permutation of the samples per (seed, epoch), the same on every worker."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["EpochOrders", "global_order", "sample_seeds"]

_AUGMENTATION = 1
"""Keeps the random stream of augmentation apart from that of the order."""


def global_order(seed: int, epoch: int, size: int) -> NDArray[np.int64]:
    """Dataset indices in the order in which one epoch visits them.

    Args:
        seed: Seed of the run, >= 0.
        epoch: Number of the epoch, >= 0.
        size: Samples in the dataset.

    Returns:
        A permutation of `range(size)`, a function of the arguments and of nothing else.
    """
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch])))
    return generator.permutation(size).astype(np.int64, copy=False)


def sample_seeds(seed: int, epoch: int, ids: NDArray[np.int64]) -> list[int]:
    """Seeds for the random choices of augmentation, one per sample.

    They depend on (seed, epoch, sample) alone, so a sample is augmented alike whatever the batch
    size, the number of workers or the process that decodes it (SplitMix64 over the sample's id).
    """
    source = np.random.SeedSequence([seed, epoch, _AUGMENTATION])
    mixed = ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed += source.generate_state(1, np.uint64)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    seeds: list[int] = (mixed ^ (mixed >> np.uint64(31))).tolist()
    return seeds


class EpochOrders:
    """`global_order` with the last two epochs remembered: training and look-ahead share them."""

    def __init__(self, seed: int, size: int) -> None:
        self._seed = seed
        self.size = size
        self._known: dict[int, NDArray[np.int64]] = {}

    def __getitem__(self, epoch: int) -> NDArray[np.int64]:
        if epoch not in self._known:
            while len(self._known) > 1:
                del self._known[min(self._known)]
            self._known[epoch] = global_order(self._seed, epoch, self.size)
        return self._known[epoch]
