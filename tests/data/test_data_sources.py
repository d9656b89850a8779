"""Contract of all readers: a new one is tested here as soon as its smallest set is described."""

import subprocess
import sys

import pytest
import torch
import torchvision
from coloured_pictures import jpeg
from pydantic import TypeAdapter, ValidationError
from test_data_cifar10 import FakeCifar10

from adaptive_platform.data import (
    AnyData,
    DataConfig,
    Samples,
    SampleStream,
    evaluation_batches,
)
from adaptive_platform.settings import variants_of

READERS = {kind: cls for kind, cls in variants_of(DataConfig).items() if kind != "python"}


@pytest.fixture
def smallest(tmp_path, write_folder, write_parquet, monkeypatch):
    """Fields that open a small set of each kind."""
    monkeypatch.setattr(torchvision.datasets, "CIFAR10", FakeCifar10)
    (tmp_path / "cifar-10-batches-py").mkdir()
    folder = write_folder(tmp_path / "folder", {"a": 4, "b": 5})
    rows = [(jpeg(k % 3, k), k % 3) for k in range(7)]
    file = write_parquet(tmp_path / "rows.parquet", rows)
    return {
        "cifar10": {"root": str(tmp_path)},
        "digits": {},
        "image_folder": {"train": str(folder), "eval": str(folder)},
        "parquet": {"train": str(file), "eval": str(file)},
        "synthetic": {"samples": 10, "eval_samples": 5},
    }


@pytest.mark.parametrize("kind", READERS)
def test_reader_keeps_the_contract(kind, smallest):
    fields = smallest[kind]
    config = TypeAdapter(AnyData).validate_python({"kind": kind, **fields})
    assert isinstance(config, READERS[kind])
    assert READERS[kind].model_validate(config.model_dump(mode="json")) == config
    source = config.open()
    again = config.open()
    assert len(source.classes) >= 2
    assert isinstance(source.train, Samples)
    for samples in (source.train, source.eval):
        assert samples.where(0) != samples.where(len(samples) - 1)
    size = len(source.train)
    (batch,) = SampleStream(source.train, config, 0, 0, 1).take(0, 0, size, 1, size).microbatches
    (same,) = SampleStream(again.train, config, 0, 0, 1).take(0, 0, size, 1, size).microbatches
    assert torch.equal(batch.inputs, same.inputs)
    assert batch.inputs.dtype == torch.uint8, "images are shipped as bytes"
    ready = batch.on("cpu").inputs
    assert ready.shape == (size, 3, 32, 32)
    assert ready.dtype == torch.float32
    assert torch.isfinite(ready).all()
    assert batch.ids.sort().values.tolist() == list(range(size))
    for targets in (
        batch.targets,
        *(b.targets for b in evaluation_batches(source.eval, config, 0, 1, 64)),
    ):
        assert targets.dtype == torch.int64
        assert targets.min() >= 0
        assert targets.max() < len(source.classes)


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("augmentation", ["none", "crop_flip", "resized_crop"])
def test_any_size_and_augmentation(kind, augmentation, smallest):
    config = READERS[kind](**smallest[kind], image_size=20, augmentation=augmentation)
    source = config.open()
    share = SampleStream(source.train, config, 0, 0, 1).take(0, 0, 5, 1, 5)
    assert share.microbatches[0].on("cpu").inputs.shape == (5, 3, 20, 20)
    batch = next(iter(evaluation_batches(source.eval, config, 0, 1, 2)))
    assert batch.on("cpu").inputs.shape == (2, 3, 20, 20)


@pytest.mark.parametrize(
    "wrong",
    [
        {"image_size": 0},
        {"std": (0.1, 0.0, 0.1)},
        {"background": (0, 0, 256)},
        {"decode_workers": -1},
        {"prefetch": 0},
        {"max_broken_share": 1.5},
        {"broken": "ignore"},
        {"augmentation": "mixup"},
        {"imagesize": 3},
    ],
)
def test_values_out_of_range_are_refused(wrong):
    with pytest.raises(ValidationError):
        TypeAdapter(AnyData).validate_python({"kind": "digits", **wrong})


def test_every_field_is_documented():
    for cls in variants_of(DataConfig).values():
        for name, field in cls.model_fields.items():
            assert name == "kind" or field.description, f"{cls.__name__}.{name}"


def test_the_room_is_imported_without_heavy_packages():
    heavy = ["torchvision", "sklearn", "pandas", "scipy", "pyarrow", "PIL", "simplejpeg", "ray"]
    code = f"import sys, adaptive_platform.data; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
