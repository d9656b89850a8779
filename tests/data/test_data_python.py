import random

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import TensorDataset

from adaptive_platform.data import PythonConfig, SampleStream, wrap_dataset
from adaptive_platform.errors import DataError


class Items:
    """A map-style data set over a list; exceptions in it are raised when read."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        if isinstance(self.items[index], Exception):
            raise self.items[index]
        return self.items[index]


def all_of(dataset, **options):
    stream = SampleStream(wrap_dataset(dataset).train, PythonConfig(**options), 0, 0, 1)
    share = stream.take(0, 0, len(dataset), minimum=1, microbatch=100)
    (batch,) = share.microbatches
    return batch, share.broken


def test_tensors_of_any_shape_pass_as_they_are():
    rows = torch.randn(7, 2, 5)
    batch, _ = all_of(TensorDataset(rows, torch.arange(7)))
    assert torch.equal(batch.inputs, rows[batch.ids])
    assert torch.equal(batch.targets, batch.ids)
    batch, _ = all_of(TensorDataset(torch.arange(12).view(4, 3), torch.randn(4, 2)))
    assert batch.inputs.dtype == torch.int64
    assert batch.targets.shape == (4, 2)


def test_labels_of_python_and_numpy_types():
    row = torch.zeros(2)
    for label, kind in [
        (3, torch.int64),
        (np.int64(3), torch.int64),
        (1.5, torch.float32),
        (np.float64(1.5), torch.float32),
        (torch.tensor(3), torch.int64),
    ]:
        batch, _ = all_of(Items([(row, label), (row, label)]))
        assert (batch.targets.dtype, batch.targets.shape) == (kind, (2,))
        assert batch.targets[0] == label


def test_pil_images_of_all_kinds_get_the_whole_preparation():
    images = [Image.new("L", (9, 30), 255), Image.new("RGBA", (30, 9), (0, 0, 0, 0))]
    batch, _ = all_of(Items([(image, 0) for image in images]), image_size=16, mean=(1, 1, 1))
    assert batch.inputs.shape == (2, 3, 16, 16)
    assert batch.on("cpu").inputs.abs().max() == 0, "white, and transparent over white"
    batch, _ = all_of(Items([(Image.new("RGB", (20, 20)), 0)] * 3))
    assert batch.inputs.shape == (3, 3, 20, 20)


def test_byte_images_are_scaled_and_normalized():
    pixels = torch.full((3, 8, 8), 255, dtype=torch.uint8)
    batch, _ = all_of(Items([(pixels, 0)]), mean=(0.5,) * 3, std=(0.25,) * 3)
    assert torch.allclose(batch.on("cpu").inputs, torch.full((1, 3, 8, 8), 2.0))


def test_damaged_samples_are_broken_and_mistakes_are_passed_on():
    row = torch.zeros(2)
    batch, broken = all_of(Items([(row, 0), OSError("image file is truncated"), (row, 2)]))
    assert batch.targets.sum() == 2
    assert [str(sample) for sample in broken] == ["train_data[1]: image file is truncated"]
    with pytest.raises(KeyError):
        all_of(Items([(row, 0), KeyError("a slip in the data set")]))


@pytest.mark.parametrize(
    "number", [lambda: torch.randn(1).item(), random.random, np.random.random_sample]
)
def test_random_transforms_of_the_data_set_follow_the_seed(number):
    class Noisy(Items):
        def __getitem__(self, index):
            return torch.tensor([number()]), index

    def draw(global_seed, epoch):
        torch.manual_seed(global_seed)
        random.seed(global_seed)
        np.random.seed(global_seed)
        stream = SampleStream(wrap_dataset(Noisy([0] * 6)).train, PythonConfig(), 4, 0, 1)
        (batch,) = stream.take(epoch, 0, 6, minimum=1, microbatch=9).microbatches
        return batch.inputs[torch.argsort(batch.ids)]

    assert torch.equal(draw(1, 0), draw(2, 0))
    assert not torch.equal(draw(1, 0), draw(1, 1))


def test_what_is_not_a_map_style_set_of_pairs_is_refused():
    with pytest.raises(DataError, match="train_data: generator has no length"):
        wrap_dataset(x for x in [])
    with pytest.raises(DataError, match="eval_data: the data set is empty"):
        wrap_dataset(Items([(torch.zeros(1), 0)]), eval=Items([]))
    with pytest.raises(DataError, match=r"train_data\[0\]: got Tensor, expected a pair"):
        wrap_dataset(Items([torch.zeros(2)]))
    with pytest.raises(DataError, match=r"different shapes, such as \(2,\) and \(3,\)"):
        all_of(Items([(torch.zeros(2), 0), (torch.zeros(3), 0)]))
    with pytest.raises(DataError, match="samples are of type str"):
        all_of(Items([("text", 0)]))


def test_a_recipe_alone_cannot_open_it_and_class_names_come_along():
    with pytest.raises(DataError, match="Pass train_data"):
        PythonConfig().open()
    named = Items([(torch.zeros(1), 0)])
    named.classes = ["a", "b"]
    assert wrap_dataset(named).classes == ("a", "b")
    assert wrap_dataset(named, classes=["x"]).classes == ("x",)
    assert wrap_dataset(Items(named.items)).classes == ()
