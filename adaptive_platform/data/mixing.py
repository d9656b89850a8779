"""Mixup, running mixup and zero random erasing of batches: pure functions and their settings.

What is drawn for a sample depends on (seed, epoch, sample) alone, as augmentation does.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn import functional as F

from adaptive_platform.data.order import sample_seeds
from adaptive_platform.settings import Settings

__all__ = ["ErasingConfig", "MixupConfig", "class_shares", "erased", "mixed", "mixing_weights"]


class MixupConfig(Settings):
    """Each sample and its target become a weighted mean with another's (arXiv 1710.09412).

    The sample's own weight is the larger one of w and 1 - w, w drawn from Beta(alpha, alpha). Needs
    data with known classes; targets become shares of them.
    """

    alpha: float = Field(default=0.4, gt=0)
    """Shape of the distribution; > 0. Published for SP-NGD: 0.4 up to batch 16,384, then 0.6, and 1
    at 131,072."""
    running: bool = False
    """The other one is the sample in the same place of this worker's batch before, as that came out
    of mixing (arXiv 2002.06015). False: the one at the other end of the same micro-batch."""


class ErasingConfig(Settings):
    """A random rectangle of an image becomes zero, after mixing (arXiv 1708.04896, 2002.06015)."""

    probability: float = Field(default=0.5, gt=0, le=1)
    """Share of the images."""
    area: tuple[float, float] = (0.02, 0.25)
    """Least and largest share of the image's area; in (0, 1]."""
    aspect: tuple[float, float] = (0.3, 1.0)
    """Least and largest ratio of the sides, lying and standing equally often; > 0."""

    @model_validator(mode="after")
    def _ranges(self) -> ErasingConfig:
        if not 0 < self.area[0] <= self.area[1] <= 1:
            raise ValueError("area: write [least, largest] with 0 < least <= largest <= 1")
        if not 0 < self.aspect[0] <= self.aspect[1]:
            raise ValueError("aspect: write [least, largest] with 0 < least <= largest")
        return self


def mixing_weights(seed: int, epoch: int, ids: NDArray[np.int64], alpha: float) -> Tensor:
    """Each sample's own weight, in [0.5, 1]; float32 [N].

    Args:
        seed: Of the run.
        epoch: Number of the epoch.
        ids: Samples.
        alpha: Shape of the distribution.
    """
    drawn = [np.random.default_rng(s).beta(alpha, alpha) for s in sample_seeds(seed, epoch, ids)]
    weights = torch.tensor(drawn, dtype=torch.float32)
    return torch.maximum(weights, 1.0 - weights)


def class_shares(targets: Tensor, classes: int) -> Tensor:
    """Class numbers [N] as float32 [N, classes]; shares are given back as they are."""
    return targets if targets.is_floating_point() else F.one_hot(targets, classes).float()


def mixed(values: Tensor, others: Tensor, weights: Tensor) -> Tensor:
    """`w v + (1 - w) o` per sample; samples without another one stay as they are.

    Args:
        values: [N, ...].
        others: [M, ...]; only the first N count.
        weights: [N].
    """
    count = min(len(values), len(others))
    own = weights[:count].to(values).view(-1, *[1] * (values.dim() - 1))
    result = values.clone()
    result[:count] = own * values[:count] + (1 - own) * others[:count]
    return result


def erased(
    images: Tensor, config: ErasingConfig, seed: int, epoch: int, ids: NDArray[np.int64]
) -> Tensor:
    """A copy with the rectangles at zero.

    Args:
        images: [N, C, H, W].
        config: How often and how large.
        seed: Of the run.
        epoch: Number of the epoch.
        ids: Samples.
    """
    height, width = images.shape[-2:]
    result = images.clone()
    # Another stream than that of the mixing weights, which start from the same seeds.
    for index, start in enumerate(sample_seeds(seed, epoch, ids)):
        random = np.random.default_rng([start, 1])
        if random.random() >= config.probability:
            continue
        area = random.uniform(*config.area) * height * width
        aspect = random.uniform(*config.aspect)
        tall = (area * aspect) ** 0.5, (area / aspect) ** 0.5
        rows, columns = tall if random.random() < 0.5 else tall[::-1]
        rows, columns = min(round(rows), height), min(round(columns), width)
        top = random.integers(height - rows + 1)
        left = random.integers(width - columns + 1)
        result[index, :, top : top + rows, left : left + columns] = 0.0
    return result
