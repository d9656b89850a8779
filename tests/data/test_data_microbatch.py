import torch

from adaptive_platform.data import MicroBatch
from adaptive_platform.data.normalization import Normalization


def test_images_are_bytes_until_they_are_where_the_model_is():
    pixels = torch.full((2, 3, 4, 5), 255, dtype=torch.uint8)
    batch = MicroBatch(
        inputs=pixels,
        targets=torch.tensor([1, 2]),
        ids=torch.tensor([7, 8]),
        normalization=Normalization((0.5, 0.5, 0.5), (0.25, 0.25, 0.25)),
    )
    moved = batch.on("cpu", torch.channels_last)
    assert torch.equal(moved.inputs, torch.full((2, 3, 4, 5), 2.0))
    assert moved.inputs.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(moved.on("cpu").inputs, moved.inputs), "normalized once"
    assert batch.inputs is pixels


def test_what_is_no_image_stays_as_it_is():
    for inputs in (torch.rand(3, 7), torch.rand(3, 2, 4, 4), torch.tensor([[1], [2]])):
        batch = MicroBatch(inputs=inputs, targets=torch.zeros(3), ids=torch.arange(3))
        assert torch.equal(batch.on("cpu", torch.channels_last).inputs, inputs)
