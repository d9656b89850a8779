"""From picture files to normalized batches, against torchvision's ImageFolder with Pillow."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from adaptive_platform.bench.dali import dali_batches, has_dali
from adaptive_platform.bench.pictures import class_folders
from adaptive_platform.bench.rows import Row, paired
from adaptive_platform.data import EncodedImages, SampleStream, ShardedCache
from adaptive_platform.data.augmentation import transform_for
from adaptive_platform.data.decoding import Decoder
from adaptive_platform.data.image_folder import ImageFolderConfig
from adaptive_platform.data.images import BrokenImageError, decode_image
from adaptive_platform.data.jpeg import decode_window, read_frame, scale_for
from adaptive_platform.data.order import sample_seeds

__all__ = ["input_pipeline"]

_SIZE = 224
_BATCH = 32
_MIB = 2**20
_SLACK = 1.5
"""A step of the prefetch rows lasts so many times as long as decoding its batch."""


def input_pipeline(
    *, quick: bool, data: str = "", count: int | None = None
) -> tuple[list[Row], list[str]]:
    """Alternate torchvision's ImageFolder with Pillow transforms, and our reader, on one set.

    Both go from files to normalized float batches of 32, with RandomResizedCrop(224) and flip for
    training, on one thread; seconds are those of the processor, so that other jobs on the machine
    count little. Where NVIDIA's DALI is installed, its CPU pipeline runs in the same blocks, from
    memory and with given windows.

    Args:
        quick: Fewer files and blocks, to end within a minute.
        data: A folder of pictures or of class folders; JPEGs are made where it is empty.
        count: Files to use, other than those.

    Returns:
        Rows, and lines on what could not be measured.

    Raises:
        DataError: There is no usable picture in `data`.
    """
    notes = [] if has_dali() else ["DALI is left out: it needs `pip install nvidia-dali-cuda120`."]
    count = count or (64 if quick else 128)
    blocks = 3 if quick else 9
    with tempfile.TemporaryDirectory() as made:
        root, what = class_folders(data, made, count)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return _measure(root, what, count, blocks), notes
        finally:
            torch.set_num_threads(threads)


def _measure(root: str, what: str, count: int, blocks: int) -> list[Row]:
    pictures = _Pictures(root, count)
    size = len(pictures.ids)
    rows = [_alone(f"files: {what}", size, "files"), _alone("file size", pictures.mean_kib, "KiB")]
    for part, training in (("training", True), ("evaluation", False)):
        theirs = _Torchvision(pictures, training)
        arms: dict[str, Callable[[], Any]] = {"torchvision": theirs.epoch}
        for name, options in (("ours", {}), ("never reduced", {"reduced_jpeg": False})):
            arms[name] = _Ours(pictures, training, options).epoch
        if training and has_dali():
            arms["DALI on the CPU"] = pictures.dali_epoch()
        seconds = _alternate(arms, blocks, size)
        for name in list(arms)[1:]:
            case = f"{part}: file to normalized" + ("" if name == "ours" else f", {name}")
            rows.append(paired("input", case, "s/image", seconds[name], seconds["torchvision"]))
        rates = [[1.0 / s for s in seconds[name]] for name in ("ours", "torchvision")]
        rows.append(paired("input", f"{part}: images per core", "1/s", *rates))
    decoders = _alternate(
        {"ours": pictures.decode_whole, "pillow": pictures.decode_by_pillow}, blocks, size
    )
    rows.append(
        paired("input", "decoding whole files", "s/image", decoders["ours"], decoders["pillow"])
    )
    rows += _differences(pictures)
    rows += _cache(pictures)
    rows += _prefetch(pictures, steps=8 if blocks < 9 else 12)
    return rows


class _Pictures:
    """Some readable files of a folder, spread over it."""

    def __init__(self, root: str, count: int) -> None:
        self.config = ImageFolderConfig(
            train=root, image_size=_SIZE, augmentation="resized_crop", max_broken_share=1.0
        )
        source = self.config.open().train
        assert isinstance(source, EncodedImages)
        chosen = np.unique(np.linspace(0, len(source) - 1, 2 * count).astype(np.int64))
        readable = [int(k) for k in chosen if _readable(source, int(k))]
        self.ids = readable[:: max(1, len(readable) // count)][:count]
        self.samples = _Chosen(source, self.ids)
        self.paths = [source.where(k) for k in self.ids]
        self.encoded = [source.encoded(k) for k in self.ids]
        self.mean_kib = sum(map(len, self.encoded)) / len(self.encoded) / 1024

    def dali_epoch(self) -> Callable[[], None]:
        """One pass by DALI over the JPEGs, from memory, repeated to the number of all pictures."""
        transform = transform_for(self.config, _SIZE, training=True)
        frames = [(encoded, read_frame(encoded)) for encoded in self.encoded]
        known = [(encoded, frame) for encoded, frame in frames if frame is not None]
        batch = len(known) // -(-len(known) // _BATCH)  # so that hardly any are left over
        batches = dali_batches(
            [encoded for encoded, _ in known],
            [transform.window(frame.height, frame.width) for _, frame in known],
            batch,
            self.config.mean,
            self.config.std,
        )

        def epoch() -> None:
            for _ in range(round(len(self.ids) / batch)):
                next(batches)

        return epoch

    def decode_whole(self) -> None:
        import simplejpeg

        for encoded in self.encoded:
            if read_frame(encoded) is None:
                decode_image(encoded, (255, 255, 255))
            else:
                simplejpeg.decode_jpeg(encoded)

    def decode_by_pillow(self) -> None:
        for encoded in self.encoded:
            decode_image(encoded, (255, 255, 255))


class _Chosen(EncodedImages):
    """The chosen files as a set of their own; counts how often storage is read."""

    image_size = _SIZE

    def __init__(self, samples: EncodedImages, ids: list[int]) -> None:
        self._samples = samples
        self._ids = ids
        self.reads = 0

    def __len__(self) -> int:
        return len(self._ids)

    def encoded(self, index: int) -> bytes:
        self.reads += 1
        return self._samples.encoded(self._ids[index])

    def label(self, index: int) -> int:
        return self._samples.label(self._ids[index])

    def where(self, index: int) -> str:
        return self._samples.where(self._ids[index])


class _Torchvision:
    """ImageFolder as its documentation shows it: Pillow, ToTensor, Normalize, a DataLoader."""

    def __init__(self, pictures: _Pictures, training: bool) -> None:
        from torchvision import transforms
        from torchvision.datasets import ImageFolder

        crop = (
            [transforms.RandomResizedCrop(_SIZE), transforms.RandomHorizontalFlip()]
            if training
            else [transforms.Resize(256), transforms.CenterCrop(_SIZE)]
        )
        config = pictures.config
        last = [transforms.ToTensor(), transforms.Normalize(config.mean, config.std)]
        folder = ImageFolder(config.train, transforms.Compose([*crop, *last]))
        at = {path: k for k, (path, _) in enumerate(folder.samples)}
        ids = [at[path] for path in pictures.paths if path in at]
        self._loader = torch.utils.data.DataLoader(
            torch.utils.data.Subset(folder, ids), batch_size=_BATCH, shuffle=training
        )

    def epoch(self) -> None:
        for inputs, _ in self._loader:
            assert inputs.dtype == torch.float32


class _Ours:
    """Our reader as the loop uses it, to where the model takes over."""

    def __init__(self, pictures: _Pictures, training: bool, options: dict[str, Any]) -> None:
        config = pictures.config.model_copy(update=options)
        self._decoder = Decoder(pictures.samples, config, seed=0, training=training)
        self._epoch = 0

    def epoch(self) -> None:
        order = np.random.default_rng(self._epoch).permutation(len(self._decoder.samples))
        for start in range(0, len(order), _BATCH):
            decoded = self._decoder(self._epoch, order[start : start + _BATCH])
            batch = self._decoder.batch(decoded, 0, len(decoded.ids))
            assert batch.on("cpu").inputs.dtype == torch.float32
        self._epoch += 1


def _alternate(
    arms: dict[str, Callable[[], Any]], blocks: int, size: int
) -> dict[str, list[float]]:
    """Processor seconds per picture of each block and arm."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for block in range(blocks + 1):  # the first one warms up
        for name, arm in arms.items():
            started = time.process_time()
            arm()
            if block > 0:
                seconds[name].append((time.process_time() - started) / size)
    return seconds


def _differences(pictures: _Pictures) -> Iterator[Row]:
    """Bytes of the same windows, ours against Pillow's decoder and resize."""
    from PIL import Image

    found: dict[str, list[NDArray[np.int64]]] = {"whole": [], "reduced": []}
    transform = transform_for(pictures.config, _SIZE, training=True)
    seeds = sample_seeds(0, 0, np.arange(len(pictures.encoded), dtype=np.int64))
    for encoded, seed in zip(pictures.encoded, seeds, strict=True):
        frame = read_frame(encoded)
        if frame is None:
            continue
        torch.manual_seed(seed)
        window = transform.window(frame.height, frame.width)
        right, bottom = window.left + window.width, window.top + window.height
        by_pillow = (
            decode_image(encoded, (255, 255, 255))
            .crop((window.left, window.top, right, bottom))
            .resize((_SIZE, _SIZE), Image.Resampling.BILINEAR)
        )
        scale = scale_for(window)
        for case, used in (("whole", 1), ("reduced", scale)):
            ours = decode_window(encoded, frame, window, used)
            if ours is not None and (case == "whole" or scale > 1):
                theirs = np.asarray(by_pillow).astype(np.int64)
                found[case].append(np.abs(ours.permute(1, 2, 0).numpy() - theirs))
    for case, differences in found.items():
        if differences:
            name = f"difference from Pillow, {case} ({len(differences)} pictures)"
            mean = float(np.mean([each.mean() for each in differences]))
            yield _alone(f"{name}: mean", mean, "of 255")
            yield _alone(f"{name}: largest", float(max(e.max() for e in differences)), "of 255")


def _cache(pictures: _Pictures) -> Iterator[Row]:
    """How often two epochs read storage, with a cache that has room and without one."""
    reads = []
    held = 0.0
    for cached in (True, False):
        samples: EncodedImages = pictures.samples
        if cached:
            samples = ShardedCache(samples, 2**14, 0, 1, lambda own: [own], one_machine=True)
        before = pictures.samples.reads
        stream = SampleStream(samples, pictures.config, 0, 0, 1)
        for epoch in (0, 1):
            share = stream.take(epoch, 0, len(samples), 1, _BATCH)
            held = max(held, share.cached_bytes / _MIB)
        if isinstance(samples, ShardedCache):
            samples.close()
        reads.append([float(pictures.samples.reads - before)])
    yield paired("input", "two epochs with a cache: reads of storage", "files", *reads)
    yield _alone("two epochs with a cache: held in memory", held, "MiB")


def _prefetch(pictures: _Pictures, steps: int) -> Iterator[Row]:
    """What a step that is longer than decoding waits, with a decode process and without."""
    size = len(pictures.samples)
    batch = min(_BATCH, size)
    step_seconds = 0.0
    waits: list[list[float]] = []
    for decode_workers in (0, 1):
        config = pictures.config.model_copy(update={"decode_workers": decode_workers})
        stream = SampleStream(pictures.samples, config, 0, 0, 1)
        found: list[float] = []
        for step in range(steps + 2):
            epoch, at = divmod(step, size // batch)
            share = stream.take(epoch, at * batch, batch, 1, batch)
            if decode_workers == 0 and step < 2:
                step_seconds = _SLACK * share.wait_seconds
            elif step >= 2:  # the first ones start the process
                found.append(share.wait_seconds)
            time.sleep(step_seconds)
        stream.close()
        waits.append(found)
    case = f"waiting in a step of {step_seconds:.2g} s, decoding ahead"
    yield paired("input", case, "s/step", waits[1], waits[0])


def _readable(samples: EncodedImages, index: int) -> bool:
    try:
        samples[index]
    except BrokenImageError:
        return False
    return True


def _alone(case: str, value: float, unit: str) -> Row:
    return Row(
        bench="input", case=case, value=value, unit=unit, baseline=None, ratio=None, repeats=1
    )
