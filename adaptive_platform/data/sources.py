"""What every reader is configured with, and what it opens: samples and class names."""

from __future__ import annotations

import os
from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator

from adaptive_platform.data.samples import Samples
from adaptive_platform.settings import Variant

__all__ = ["Channels", "DataConfig", "DataPath", "DataSource", "EncodedDataConfig"]


def _absolute(path: str) -> str:
    if "://" in path:
        raise ValueError("data is read from local or mounted paths; mount or copy it first")
    if not path.strip():
        raise ValueError("name a path")
    return os.path.abspath(os.path.expanduser(path))


DataPath = Annotated[str, AfterValidator(_absolute)]
"""A local path, made absolute where the recipe is read: workers have another current directory."""

Channels = tuple[float, float, float]
"""One number for each of red, green and blue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSource:
    """An opened data set."""

    train: Samples
    eval: Samples | None
    """Held-out samples; None where there are none."""
    classes: tuple[str, ...]
    """Class names by number; empty where unknown. Belongs in the checkpoint: another list on
    resume means that the numbers have shifted."""
    notes: tuple[str, ...] = ()
    """One line each: what was left out or looks odd, with counts."""


class DataConfig(Variant):
    """Fields that all readers share."""

    image_size: int | None = Field(default=None, ge=1, le=4096)
    """Side in pixels that images are brought to. None: the images' own size where they are all
    square and alike, else 224."""
    augmentation: Literal["none", "crop_flip", "resized_crop"] = "none"
    """Training only. none: resize. crop_flip: resize, pad by 4, crop at random, flip.
    resized_crop: random area and aspect ratio, flip; evaluation then resizes the shorter side to
    8/7 of the size and crops the centre."""
    flip: bool = True
    """Whether augmentation mirrors images at random. Switch it off where left and right matter."""
    mean: Channels = (0.485, 0.456, 0.406)
    """Mean of each channel, pixels in [0, 1], subtracted from it."""
    std: Channels = (0.229, 0.224, 0.225)
    """Standard deviation of each channel, pixels in [0, 1], > 0; divides it."""
    background: tuple[
        Annotated[int, Field(ge=0, le=255)],
        Annotated[int, Field(ge=0, le=255)],
        Annotated[int, Field(ge=0, le=255)],
    ] = (255, 255, 255)
    """Colour (0 to 255) shown through transparent pixels; white."""
    decode_workers: int = Field(default=0, ge=0, le=256)
    """Processes per training worker that read and decode ahead; 0 reads inside the worker."""
    prefetch: int = Field(default=4, ge=1, le=1024)
    """Chunks of 16 samples that each decode process keeps ready."""
    decode_timeout_seconds: float = Field(default=300.0, gt=0)
    """Longest wait for a chunk from the decode processes before the run stops."""
    broken: Literal["skip", "stop"] = "skip"
    """What to do with a sample that can't be read: leave it out and count it, or stop the run."""
    max_broken_share: float = Field(default=0.1, ge=0, le=1)
    """Share of the training set that may be broken before the run stops."""

    @field_validator("std")
    @classmethod
    def _positive(cls, value: Channels) -> Channels:
        if min(value) <= 0:
            raise ValueError("every standard deviation must be > 0")
        return value

    @property
    def cache_limit_mib(self) -> int:
        """MiB of encoded images that a worker may keep in memory; 0 for readers without a cache."""
        return 0

    @abstractmethod
    def open(self) -> DataSource:
        """Find the data and check it, before any worker trains.

        Raises:
            DataError: Missing, empty or of the wrong shape; the message names path and fix.
        """


class EncodedDataConfig(DataConfig):
    """Fields of the readers whose images are encoded files."""

    reduced_jpeg: bool = True
    """Whether a JPEG whose window is at least four times as large as the result is decoded at 1/4
    or 1/8 of its size: faster, and pixels differ from those of the full picture by 1 or 2 of 255 on
    average. Smaller ones are decoded in full either way."""
