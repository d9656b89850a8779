"""Reader `digits`: the 1,797 handwritten digits that scikit-learn ships, no download needed."""

from __future__ import annotations

import gzip
import importlib.util
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from adaptive_platform.data.samples import InMemoryImages
from adaptive_platform.data.sources import Channels, DataConfig, DataSource
from adaptive_platform.errors import DataError

__all__ = ["DigitsConfig"]

_SIZE = 32
_FILE = Path("datasets/data/digits.csv.gz")
_HELD_OUT_EVERY = 5


class DigitsConfig(DataConfig):
    """Handwritten digits, 8x8 gray levels resized (bilinear) and shown in three equal channels.

    Held out: of each class, in file order, samples 5, 10, 15 and so on, which is a fifth of every
    class (355 in all) and the same for everyone. 1,442 remain for training. All in memory.
    """

    kind: Literal["digits"] = "digits"
    flip: bool = False
    """Whether augmentation mirrors images at random; off, since a mirrored digit is no digit."""
    mean: Channels = (0.305, 0.305, 0.305)
    """Mean of each channel, pixels in [0, 1]; that of the resized digits."""
    std: Channels = (0.324, 0.324, 0.324)
    """Standard deviation of each channel, pixels in [0, 1]; that of the resized digits."""

    def open(self) -> DataSource:
        """Read the file inside the installed scikit-learn, without importing scikit-learn.

        Raises:
            DataError: scikit-learn or its file is not there.
        """
        pixels, labels = _read(_packaged_file())
        size = self.image_size or _SIZE
        pixels = F.interpolate(pixels, size=(size, size), mode="bilinear", align_corners=False)
        pixels = (pixels * (255.0 / 16.0)).round_().clamp_(0, 255).to(torch.uint8)
        held_out = _held_out(labels)
        return DataSource(
            train=InMemoryImages(pixels[~held_out], labels[~held_out], "digits train"),
            eval=InMemoryImages(pixels[held_out], labels[held_out], "digits eval"),
            classes=tuple("0123456789"),
        )


def _packaged_file() -> Path:
    found = importlib.util.find_spec("sklearn")
    for folder in (found.submodule_search_locations or []) if found else []:
        if (Path(folder) / _FILE).is_file():
            return Path(folder) / _FILE
    raise DataError(
        "data.kind = digits: the images come inside scikit-learn, which is not installed here or "
        f"lacks {_FILE}. Run `pip install scikit-learn`."
    )


def _read(path: Path) -> tuple[Tensor, Tensor]:
    """Gray levels in [0, 16], float32 [N, 1, 8, 8], and labels, int64 [N]."""
    with gzip.open(path, "rt", encoding="ascii") as lines:
        table = np.loadtxt(lines, delimiter=",", dtype=np.float32)
    pixels = torch.from_numpy(table[:, :64]).reshape(-1, 1, 8, 8)
    return pixels, torch.from_numpy(table[:, 64].astype(np.int64))


def _held_out(labels: Tensor) -> Tensor:
    """True for every fifth sample of each class."""
    mask = torch.zeros(len(labels), dtype=torch.bool)
    for number in range(10):
        members = torch.nonzero(labels == number).flatten()
        mask[members[_HELD_OUT_EVERY - 1 :: _HELD_OUT_EVERY]] = True
    return mask
