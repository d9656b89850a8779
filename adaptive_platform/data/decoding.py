"""Sample ids to tensors: read, transform, and set apart what can't be read, in any process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adaptive_platform.data.augmentation import Transform, is_random, transform_for
from adaptive_platform.data.broken import BrokenSample
from adaptive_platform.data.images import BrokenImageError, decode_image, to_rgb
from adaptive_platform.data.jpeg import decode_window, read_frame, scale_for
from adaptive_platform.data.microbatch import MicroBatch
from adaptive_platform.data.normalization import Normalization
from adaptive_platform.data.order import sample_seeds
from adaptive_platform.data.randomness import SampleRandomness
from adaptive_platform.data.samples import EncodedImages, InMemoryImages, Samples
from adaptive_platform.data.sources import DataConfig, EncodedDataConfig
from adaptive_platform.errors import DataError

__all__ = ["Decoded", "Decoder"]

Rows = Tensor | Sequence[Tensor]
"""Samples along the first axis: one tensor, or a list where shapes may differ."""


@dataclass(slots=True)
class Decoded:
    """Some samples after the transform, in the order asked for, without the broken ones."""

    ids: NDArray[np.int64]
    inputs: Rows
    targets: Rows
    broken: list[BrokenSample]

    def reordered(self, index: NDArray[np.int64], usable: int) -> Decoded:
        """The first `usable` samples in the order of `index`; the others stay behind them."""
        rest = np.arange(usable, len(self.ids), dtype=np.int64)
        index = np.concatenate([index, rest])
        return Decoded(
            self.ids[index],
            _rows(self.inputs, index),
            _rows(self.targets, index),
            self.broken,
        )


def _rows(rows: Rows, index: NDArray[np.int64]) -> Rows:
    if isinstance(rows, Tensor):
        return rows[torch.from_numpy(index)]
    return [rows[k] for k in index.tolist()]


class Decoder:
    """Reads samples and transforms them; a plain value that decode processes can hold.

    Args:
        samples: What to read from.
        config: Transform, normalization and background.
        seed: Seed of the run; a sample's random choices are a function of (seed, epoch, id).
        training: Whether to augment.
    """

    def __init__(self, samples: Samples, config: DataConfig, seed: int, training: bool) -> None:
        self.samples = samples
        self._background = config.background
        self._seed = seed
        self._normalization = Normalization(config.mean, config.std)
        self._reduces = isinstance(config, EncodedDataConfig) and config.reduced_jpeg
        random = is_random(config, training)
        self._seeded = random or samples.reads_randomly
        self._ready: InMemoryImages | None = None
        self._transform: Transform | None = None
        size = config.image_size or samples.image_size
        if isinstance(samples, InMemoryImages) and not random and samples.pixels.shape[-1] == size:
            self._ready = samples
        elif size is not None:
            self._transform = transform_for(config, size, training)

    def __call__(self, epoch: int, ids: NDArray[np.int64]) -> Decoded:
        """Read and transform samples.

        Args:
            epoch: Enters the random choices only.
            ids: Indices in the data set.
        """
        if self._ready is not None:
            index = torch.from_numpy(ids)
            return Decoded(ids, self._ready.pixels[index], self._ready.labels[index], [])
        if not self._seeded:
            return self._read(ids, lambda k: None)
        with SampleRandomness(foreign=self.samples.reads_randomly) as randomness:
            seeds = sample_seeds(self._seed, epoch, ids)
            return self._read(ids, lambda k: randomness.seed(seeds[k]))

    def batch(self, decoded: Decoded, start: int, stop: int) -> MicroBatch:
        """Stack samples [start, stop) of what was decoded; images stay bytes.

        Raises:
            DataError: Their shapes differ.
        """
        inputs = self._stacked(decoded.inputs[start:stop], "inputs")
        pixels = inputs.dtype == torch.uint8 and inputs.dim() == 4 and inputs.shape[1] in (1, 3)
        return MicroBatch(
            inputs=inputs,
            targets=self._stacked(decoded.targets[start:stop], "labels"),
            ids=torch.from_numpy(decoded.ids[start:stop].copy()),
            normalization=self._normalization if pixels else None,
        )

    def _read(self, ids: NDArray[np.int64], begin: Callable[[int], None]) -> Decoded:
        kept: list[int] = []
        inputs: list[Tensor] = []
        targets: list[Tensor] = []
        broken: list[BrokenSample] = []
        for k, index in enumerate(ids.tolist()):
            begin(k)
            try:
                prepared, label = self._sample(index)
            except BrokenImageError as error:
                broken.append(BrokenSample(index, self.samples.where(index), str(error)))
                continue
            inputs.append(prepared)
            targets.append(_target(label))
            kept.append(k)
        return Decoded(ids[kept], _packed(inputs), _packed(targets), broken)

    def _sample(self, index: int) -> tuple[Tensor, Any]:
        samples = self.samples
        if isinstance(samples, EncodedImages) and self._transform is not None:
            return self._decoded(samples.encoded(index), self._transform), samples.label(index)
        image, label = samples[index]
        return self._prepared(image), label

    def _decoded(self, encoded: bytes, transform: Transform) -> Tensor:
        """Decode only what the transform will look at, where the format allows that."""
        window = None
        frame = read_frame(encoded)
        if frame is not None:
            window = transform.window(frame.height, frame.width)
            scale = scale_for(window) if self._reduces else 1
            pixels = decode_window(encoded, frame, window, scale)
            if pixels is not None:
                return transform.finish(pixels)
        return transform(decode_image(encoded, self._background), window)

    def _prepared(self, image: Any) -> Tensor:
        if isinstance(image, Tensor):
            if self.samples.tensors_are_images and self._transform is not None:
                return self._transform(image)
            return image
        if isinstance(image, np.ndarray):
            return torch.from_numpy(image)
        if self._transform is None:
            raise DataError(
                f"data: samples are of type {type(image).__name__}; return tensors or PIL images"
            )
        return self._transform(to_rgb(image, self._background))

    def _stacked(self, rows: Rows, what: str) -> Tensor:
        if isinstance(rows, Tensor):
            return rows
        shapes = sorted({tuple(row.shape) for row in rows})
        if len(shapes) > 1:
            raise DataError(
                f"data: {what} of one batch have different shapes, such as {shapes[0]} and "
                f"{shapes[1]}. Bring them to one shape in the data set's own transform, or return "
                "PIL images and set data.image_size."
            )
        return torch.stack(tuple(rows))


def _target(label: Any) -> Tensor:
    if isinstance(label, Tensor):
        return label
    value = torch.as_tensor(label)
    return value.to(torch.float32) if value.dtype == torch.float64 else value


def _packed(rows: list[Tensor]) -> Rows:
    """One tensor where shapes allow: a single hand-over between processes instead of many."""
    alike = len({(row.shape, row.dtype) for row in rows}) == 1
    return torch.stack(rows) if alike else rows
