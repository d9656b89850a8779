"""Random choices per sample: generators seeded for one read at a time, and put back afterwards."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

__all__ = ["SampleRandomness"]


class SampleRandomness:
    """While it is entered, the default generators may be seeded; on leaving they are as before.

    Args:
        foreign: Also those of `random` and NumPy, which a user's own transforms may draw from;
            ours draw from torch's only.
    """

    def __init__(self, foreign: bool) -> None:
        self._foreign = foreign
        self._torch: torch.Tensor | None = None
        self._others: tuple[Any, Any] | None = None

    def __enter__(self) -> SampleRandomness:
        self._torch = torch.get_rng_state()
        if self._foreign:
            self._others = random.getstate(), np.random.get_state()
        return self

    def seed(self, seed: int) -> None:
        """Begin a sample, whose choices are then a function of `seed` (64 bits)."""
        torch.default_generator.manual_seed(seed)
        if self._foreign:
            random.seed(seed)
            np.random.seed(seed & 0xFFFFFFFF)

    def __exit__(self, *_: object) -> None:
        assert self._torch is not None
        torch.set_rng_state(self._torch)
        if self._others is not None:
            random.setstate(self._others[0])
            np.random.set_state(self._others[1])
