"""Transforms before and beside training, made of torchvision.transforms.v2: image in, uint8 out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from adaptive_platform.data.sources import DataConfig

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["Transform", "Window", "is_random", "transform_for"]

_FLIPPED = 0.5
"""Share of the images that are mirrored."""
_PIXEL = torch.zeros(1, 1, 1, dtype=torch.uint8)
"""Stands for a picture of any size that is not there yet."""


@dataclass(frozen=True, slots=True)
class Window:
    """The part of an image that is resized, and to what; in pixels."""

    top: int
    left: int
    height: int
    width: int
    to_height: int
    to_width: int

    def resized(self, pixels: Tensor) -> Tensor:
        """Cut the window out of a whole picture and resize it (bilinear, antialiased).

        Args:
            pixels: uint8, [C, H, W], with all rows that the window needs.

        Returns:
            uint8, [C, to_height, to_width].
        """
        from torchvision.transforms.v2.functional import resize_image

        part = pixels[:, self.top : self.top + self.height, self.left : self.left + self.width]
        result: Tensor = resize_image(part, [self.to_height, self.to_width], antialias=True)
        return result


def is_random(config: DataConfig, training: bool) -> bool:
    """True where the transform draws random numbers."""
    return training and config.augmentation != "none"


def transform_for(config: DataConfig, size: int, training: bool) -> Transform:
    """The geometric part of the preparation of an RGB image.

    Args:
        config: Which augmentation.
        size: Side of the result in pixels.
        training: Whether to augment.
    """
    return Transform(config, size, training)


class Transform:
    """Cuts a window out of an image, resizes it, and finishes the result (pads, crops, flips).

    The window is chosen before the image is needed, so that a decoder can leave out the rest.
    Random choices come from torch's default generator, so that a caller can seed it per sample;
    they depend on the image's height and width and on nothing else of it. Conversion to floating
    point is done for a whole batch: see `Normalization`.

    Args:
        config: Which augmentation.
        size: Side of the result in pixels.
        training: Whether to augment.
    """

    def __init__(self, config: DataConfig, size: int, training: bool) -> None:
        from torchvision.transforms import v2

        cropped = config.augmentation == "resized_crop"
        self._size = size
        self._random_crop = v2.RandomResizedCrop(size) if cropped and training else None
        self._shorter_side = round(size * 8 / 7) if cropped and not training else None
        shifted = training and config.augmentation == "crop_flip"
        self._shift = v2.RandomCrop(size, padding=4) if shifted else None
        self._flips = is_random(config, training) and config.flip

    def __call__(self, image: Tensor | Image.Image, window: Window | None = None) -> Tensor:
        """Transform an image.

        Args:
            image: RGB, or a uint8 tensor [C, H, W].
            window: What `window` returned for it; chosen now where None.

        Returns:
            uint8, [C, size, size].
        """
        pixels = image if isinstance(image, Tensor) else _pixels(image)
        chosen = window or self.window(pixels.shape[-2], pixels.shape[-1])
        return self.finish(chosen.resized(pixels))

    def window(self, height: int, width: int) -> Window:
        """Choose the part of an image of that height and width (pixels) that will be seen."""
        size = self._size
        if self._random_crop is not None:
            chosen = self._random_crop.make_params([_PIXEL.expand(3, height, width)])
            return Window(
                chosen["top"], chosen["left"], chosen["height"], chosen["width"], size, size
            )
        if self._shorter_side is not None:
            short, long = sorted((height, width))
            longer_side = int(self._shorter_side * long / short)
            sides = (self._shorter_side, longer_side)
            return Window(0, 0, height, width, *(sides if height <= width else sides[::-1]))
        return Window(0, 0, height, width, size, size)

    def finish(self, resized: Tensor) -> Tensor:
        """What follows the resize: uint8, [C, to_height, to_width] to [C, size, size]."""
        # Kernels, not transforms, which take as long to find the kernel as it then takes to run.
        from torchvision.transforms.v2 import functional as F

        result = resized
        if self._shorter_side is not None:
            result = F.center_crop_image(result, [self._size, self._size])
        if self._shift is not None:
            result = self._shift(result)
        if self._flips and torch.rand(1) < _FLIPPED:
            result = F.horizontal_flip_image(result)
        return result


def _pixels(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)
