"""Reader `cifar10`: torchvision's copy of CIFAR-10 from a local folder."""

from __future__ import annotations

import os
from typing import Any, Literal

import torch

from adaptive_platform.data.samples import InMemoryImages
from adaptive_platform.data.sources import Channels, DataConfig, DataPath, DataSource
from adaptive_platform.errors import DataError

__all__ = ["Cifar10Config"]


class Cifar10Config(DataConfig):
    """CIFAR-10: 50,000 training and 10,000 held-out images of 32x32 pixels, all in memory."""

    kind: Literal["cifar10"] = "cifar10"
    root: DataPath
    """Folder that holds, or will hold, `cifar-10-batches-py`."""
    download: bool = False
    """Whether to fetch the 170 MB archive where it is missing. Never without being asked; with
    several workers on one machine, open the data once before starting them."""
    mean: Channels = (0.4914, 0.4822, 0.4465)
    """Mean of each channel, pixels in [0, 1]; that of CIFAR-10."""
    std: Channels = (0.2470, 0.2435, 0.2616)
    """Standard deviation of each channel, pixels in [0, 1]; that of CIFAR-10."""

    def open(self) -> DataSource:
        """Load both parts after checking their checksums.

        Raises:
            DataError: The files are missing or damaged, or the download failed.
        """
        folder = os.path.join(self.root, "cifar-10-batches-py")
        if not self.download and not os.path.isdir(folder):
            raise DataError(
                f"data.root = {self.root}: there is no folder cifar-10-batches-py in it. Unpack "
                "cifar-10-python.tar.gz there, or set data.download=true."
            )
        from torchvision.datasets import CIFAR10

        try:
            parts: list[Any] = [
                CIFAR10(self.root, train=train, download=self.download) for train in (True, False)
            ]
        except (RuntimeError, OSError) as error:
            raise DataError(
                f"data.root = {self.root}: CIFAR-10 is incomplete or damaged, or could not be "
                f"fetched ({error}). Remove {folder} and unpack or download it again."
            ) from error
        return DataSource(
            train=self._images(parts[0], "cifar10 train"),
            eval=self._images(parts[1], "cifar10 eval"),
            classes=tuple(parts[0].classes),
        )

    def _images(self, part: Any, name: str) -> InMemoryImages:
        pixels = torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous()
        return InMemoryImages(pixels, torch.tensor(part.targets), name, self.image_size)
