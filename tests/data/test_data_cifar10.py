import numpy as np
import pytest
import torch
import torchvision

from adaptive_platform.data.cifar10 import Cifar10Config
from adaptive_platform.errors import DataError


class FakeCifar10:
    classes = ("airplane", "cat")

    def __init__(self, root, train, download):
        assert not download
        self.data = np.zeros((6 if train else 2, 32, 32, 3), dtype=np.uint8)
        self.data[..., 0] = 255
        self.targets = [k % 2 for k in range(len(self.data))]


def test_missing_folder_says_what_to_do_and_downloads_nothing(tmp_path):
    with pytest.raises(DataError, match=r"data.root = .*cifar-10-batches-py.*data.download=true"):
        Cifar10Config(root=str(tmp_path)).open()
    assert list(tmp_path.iterdir()) == []


def test_damaged_files_are_named(tmp_path):
    (tmp_path / "cifar-10-batches-py").mkdir()
    with pytest.raises(DataError, match="incomplete or damaged"):
        Cifar10Config(root=str(tmp_path)).open()


def test_channels_come_first(tmp_path, monkeypatch):
    (tmp_path / "cifar-10-batches-py").mkdir()
    monkeypatch.setattr(torchvision.datasets, "CIFAR10", FakeCifar10)
    source = Cifar10Config(root=str(tmp_path)).open()
    pixels, label = source.train[1]
    assert pixels.shape == (3, 32, 32)
    assert torch.equal(pixels.float().mean((1, 2)), torch.tensor([255.0, 0.0, 0.0]))
    assert (int(label), len(source.train), len(source.eval)) == (1, 6, 2)
    assert source.classes == ("airplane", "cat")
