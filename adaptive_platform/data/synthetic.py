"""Reader `synthetic`: learnable images made from a seed, for tests and timing without a disk."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from adaptive_platform.data.samples import InMemoryImages
from adaptive_platform.data.sources import Channels, DataConfig, DataSource
from adaptive_platform.errors import DataError

__all__ = ["SyntheticConfig"]

_SIZE = 32
_LARGEST_BYTES = 2 * 2**30
_PATCHES = 4
"""Each class is a coarse random picture of 4x4 coloured patches."""


class SyntheticConfig(DataConfig):
    """A coarse picture per class, the same for training and held-out samples, plus pixel noise."""

    kind: Literal["synthetic"] = "synthetic"
    samples: int = Field(default=1024, ge=1)
    """Training samples."""
    eval_samples: int = Field(default=256, ge=0)
    """Held-out samples; 0 for none. Their labels are never wrong."""
    num_classes: int = Field(default=10, ge=2)
    """Classes, in equal shares."""
    noise: float = Field(default=0.25, ge=0, le=10)
    """Standard deviation of the noise on each pixel, where pixels lie in [0, 1]."""
    label_noise: float = Field(default=0.0, ge=0, le=1)
    """Share of training labels that are replaced by a random class."""
    data_seed: int = Field(default=0, ge=0)
    """Seed of the images; the seed of the run does not change them."""
    mean: Channels = (0.5, 0.5, 0.5)
    """Mean of each channel, pixels in [0, 1]."""
    std: Channels = (0.25, 0.25, 0.25)
    """Standard deviation of each channel, pixels in [0, 1]."""

    def open(self) -> DataSource:
        """Make the images.

        Raises:
            DataError: They would take more than 2 GiB of memory.
        """
        size = self.image_size or _SIZE
        needed = (self.samples + self.eval_samples) * 3 * size * size
        if needed > _LARGEST_BYTES:
            raise DataError(
                f"data.samples = {self.samples}: {needed / 2**30:.1f} GiB of synthetic images at "
                f"{size}x{size}, at most {_LARGEST_BYTES // 2**30} GiB are made. Lower "
                "data.samples or data.image_size."
            )
        generator = torch.Generator().manual_seed(self.data_seed)
        coarse = torch.rand(self.num_classes, 3, _PATCHES, _PATCHES, generator=generator)
        pictures = F.interpolate(coarse, size=(size, size), mode="bilinear", align_corners=False)
        train = self._make(pictures, self.samples, self.label_noise, "synthetic train", generator)
        held_out = None
        if self.eval_samples:
            held_out = self._make(pictures, self.eval_samples, 0.0, "synthetic eval", generator)
        return DataSource(
            train=train,
            eval=held_out,
            classes=tuple(f"class {number}" for number in range(self.num_classes)),
        )

    def _make(
        self,
        pictures: Tensor,
        samples: int,
        label_noise: float,
        name: str,
        generator: torch.Generator,
    ) -> InMemoryImages:
        true = torch.arange(samples) % self.num_classes
        pixels = torch.empty(samples, *pictures.shape[1:], dtype=torch.uint8)
        for start in range(0, samples, 256):
            block = pictures[true[start : start + 256]]
            block = block + self.noise * torch.randn(block.shape, generator=generator)
            pixels[start : start + 256] = (block.clamp(0, 1) * 255).to(torch.uint8)
        wrong = torch.rand(samples, generator=generator) < label_noise
        guessed = torch.randint(self.num_classes, (samples,), generator=generator)
        return InMemoryImages(pixels, torch.where(wrong, guessed, true), name)
