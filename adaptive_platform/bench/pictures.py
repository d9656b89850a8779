"""Picture files for the input benchmark: those of a folder, or made ones that cost as much."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from adaptive_platform.errors import DataError

__all__ = ["class_folders", "make_pictures"]

_SIZES = ((500, 375), (375, 500), (500, 333), (500, 375), (640, 480), (400, 300), (1024, 768))
"""Width and height: what ImageNet's files mostly have, and one of the larger ones."""
_QUALITY = 95
_GRAIN = 5.0


def class_folders(data: str, made: str, count: int) -> tuple[str, str]:
    """A folder of class folders, as the readers want it.

    Args:
        data: A folder of class folders, or of pictures; empty to make some.
        made: An empty folder for what has to be made.
        count: How many to make.

    Returns:
        The folder, and what is in it, for people.

    Raises:
        DataError: `data` is no folder.
    """
    if not data:
        make_pictures(os.path.join(made, "made"), count)
        return made, "made JPEGs (noise with the spectrum of photographs), not real ones"
    folder = os.path.abspath(os.path.expanduser(data))
    if not os.path.isdir(folder):
        raise DataError(f"--data = {data}: is no folder. Name one that holds pictures.")
    if any(entry.is_dir() and not entry.name.startswith(".") for entry in os.scandir(folder)):
        return folder, data
    os.symlink(folder, os.path.join(made, "all"), target_is_directory=True)
    return made, data


def make_pictures(folder: str, count: int, sizes: Sequence[tuple[int, int]] = _SIZES) -> None:
    """Write JPEG files of ImageNet's typical sizes in pixels and bytes.

    Amplitudes fall with the frequency, as they do in photographs, with shapes of one colour and
    some grain on top, so that the work of a decoder is about that of a photograph.
    """
    from PIL import Image

    Path(folder).mkdir(parents=True, exist_ok=True)
    for index in range(count):
        width, height = sizes[index % len(sizes)]
        picture = Image.fromarray(_picture(height, width, index))
        picture.save(os.path.join(folder, f"{index:05d}.jpg"), "JPEG", quality=_QUALITY)


def _picture(height: int, width: int, seed: int) -> NDArray[np.uint8]:
    generator = np.random.default_rng(seed)
    rows, columns = np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None, :]
    falling = 1.0 / np.maximum(np.hypot(rows, columns), 1.0 / max(height, width))
    falling[0, 0] = 0.0
    noise = generator.normal(size=(3, height, width))
    noise[1:] = 0.9 * noise[0] + 0.4 * noise[1:]  # colours go together
    smooth = np.fft.irfft2(np.fft.rfft2(noise) * falling, s=(height, width))
    pixels = 120.0 + 45.0 * smooth / smooth.std()
    for _ in range(6):
        top, left = generator.integers(0, height - 20), generator.integers(0, width - 20)
        bottom = generator.integers(top + 20, height + 1)
        right = generator.integers(left + 20, width + 1)
        pixels[:, top:bottom, left:right] += generator.normal(0.0, 30.0, (3, 1, 1))
    pixels += generator.normal(0.0, _GRAIN, (1, height, width))
    return np.clip(pixels, 0, 255).astype(np.uint8).transpose(1, 2, 0)
