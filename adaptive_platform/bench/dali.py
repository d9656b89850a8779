"""NVIDIA DALI's CPU pipeline as another way through JPEG files: it decodes the crop and no more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec

import numpy as np
from numpy.typing import NDArray

from adaptive_platform.data.augmentation import Window
from adaptive_platform.data.sources import Channels

__all__ = ["dali_batches", "has_dali"]


def has_dali() -> bool:
    """True where the package is installed (`pip install nvidia-dali-cuda120`)."""
    return find_spec("nvidia") is not None and find_spec("nvidia.dali") is not None


def dali_batches(
    encoded: Sequence[bytes], windows: Sequence[Window], batch: int, mean: Channels, std: Channels
) -> Iterator[NDArray[np.float32]]:
    """Normalized batches [batch, 3, to_height, to_width] of given windows, over and over.

    Args:
        encoded: JPEG files.
        windows: Of each file, all to one size; unlike its own random crop these are repeatable.
        batch: Pictures per batch; what is left over at the end of the files is left out.
        mean: Of each channel, pixels in [0, 1].
        std: Of each channel, pixels in [0, 1].
    """
    dali, fn = import_module("nvidia.dali"), import_module("nvidia.dali.fn")
    pipeline = dali.Pipeline(
        batch_size=batch, num_threads=1, device_id=None, prefetch_queue_depth=1
    )
    with pipeline:
        files, starts, shapes = (fn.external_source(name=name) for name in ("file", "at", "shape"))
        pixels = fn.decoders.image_slice(
            files, starts, shapes, axes=[0, 1], normalized_anchor=False, normalized_shape=False
        )
        resized = fn.resize(
            pixels,
            resize_x=windows[0].to_width,
            resize_y=windows[0].to_height,
            interp_type=dali.types.INTERP_LINEAR,
            antialias=True,
        )
        normalized = fn.crop_mirror_normalize(
            resized,
            dtype=dali.types.FLOAT,
            mean=[255.0 * value for value in mean],
            std=[255.0 * value for value in std],
            output_layout="CHW",
        )
        pipeline.set_outputs(normalized)
    pipeline.build()
    data = [np.frombuffer(file, np.uint8) for file in encoded]
    at = [np.array([w.top, w.left], np.int64) for w in windows]
    shape = [np.array([w.height, w.width], np.int64) for w in windows]
    while True:
        for start in range(0, len(data) - batch + 1, batch):
            part = slice(start, start + batch)
            for name, values in (("file", data), ("at", at), ("shape", shape)):
                pipeline.feed_input(name, values[part])
            (found,) = pipeline.run()
            yield np.array(found.as_tensor())
