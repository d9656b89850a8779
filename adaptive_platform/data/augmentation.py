"""Transforms before and beside training, made of torchvision.transforms.v2: image in, uint8 out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from adaptive_platform.data.sources import DataConfig

__all__ = ["is_random", "normalized", "transform_for"]


def is_random(config: DataConfig, training: bool) -> bool:
    """True where the transform draws random numbers."""
    return training and config.augmentation != "none"


def transform_for(config: DataConfig, size: int, training: bool) -> Callable[[Any], Tensor]:
    """The geometric part of the preparation of an RGB image.

    Random choices come from torch's default generator, so that a caller can seed it per sample.
    Conversion to floating point and normalization are done for a whole batch: see `normalized`.

    Args:
        config: Which augmentation.
        size: Side of the result in pixels.
        training: Whether to augment.

    Returns:
        A function from a PIL image, or a uint8 tensor [C, H, W], to a uint8 tensor [C, size, size].
    """
    from torchvision.transforms import v2

    steps: list[Any]
    if config.augmentation != "resized_crop":
        steps = [v2.Resize((size, size), antialias=True)]
    elif training:
        steps = [v2.RandomResizedCrop(size, antialias=True)]
    else:
        steps = [v2.Resize(round(size * 8 / 7), antialias=True), v2.CenterCrop(size)]
    if training and config.augmentation == "crop_flip":
        steps.append(v2.RandomCrop(size, padding=4))
    if is_random(config, training) and config.flip:
        steps.append(v2.RandomHorizontalFlip())
    return v2.Compose([*steps, v2.PILToTensor()])


def normalized(pixels: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Scale a batch of uint8 images to [0, 1] and normalize it; gray becomes three channels.

    Args:
        pixels: uint8, [N, 1 or 3, H, W].
        mean: [3, 1, 1].
        std: [3, 1, 1].

    Returns:
        float32, [N, 3, H, W].
    """
    return (pixels.to(torch.float32) / 255.0 - mean) / std
