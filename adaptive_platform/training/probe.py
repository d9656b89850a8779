"""A few training samples, the same ones all along, read without chance: for measuring."""

from __future__ import annotations

from typing import Any

import numpy as np

from adaptive_platform.data import DataConfig, Samples

__all__ = ["chosen_samples", "read_plainly"]


def chosen_samples(samples: Samples, count: int, seed: int) -> Samples:
    """`count` of `samples`, drawn once by the seed; all where there are no more."""
    size = min(count, len(samples))
    chosen = np.random.default_rng(seed).choice(len(samples), size, replace=False)
    return _Chosen(samples, [int(i) for i in chosen])


def read_plainly(config: DataConfig) -> DataConfig:
    """How to read them: in this process, leaving out what is broken."""
    return config.model_copy(update={"decode_workers": 0, "broken": "skip"})


class _Chosen(Samples):
    """Some samples of a set."""

    def __init__(self, samples: Samples, ids: list[int]) -> None:
        self._samples = samples
        self._ids = ids
        self.image_size = samples.image_size
        self.tensors_are_images = samples.tensors_are_images
        self.reads_randomly = samples.reads_randomly

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self._samples[self._ids[index]]

    def where(self, index: int) -> str:
        return self._samples.where(self._ids[index])
