import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from adaptive_platform.data.augmentation import is_random, transform_for
from adaptive_platform.data.synthetic import SyntheticConfig


def config(**options):
    return SyntheticConfig(**options)


def picture(width, height):
    pixels = np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@pytest.mark.parametrize("augmentation", ["none", "crop_flip", "resized_crop"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("size", [(8, 300), (300, 8), (40, 40)])
def test_every_image_becomes_a_square_of_bytes(augmentation, training, size):
    result = transform_for(config(augmentation=augmentation), 24, training)(picture(*size))
    assert result.shape == (3, 24, 24)
    assert result.dtype == torch.uint8


def test_evaluation_draws_no_random_numbers_and_training_does():
    for augmentation in ("none", "crop_flip", "resized_crop"):
        for training in (True, False):
            chosen = config(augmentation=augmentation)
            transform = transform_for(chosen, 24, training)
            before = torch.get_rng_state()
            transform(picture(40, 40))
            drew = not torch.equal(before, torch.get_rng_state())
            assert drew == is_random(chosen, training) == (training and augmentation != "none")


def test_crop_flip_shifts_by_at_most_four_pixels_and_mirrors_only_where_allowed():
    image = torch.zeros(3, 16, 16, dtype=torch.uint8)
    image[:, 7, 5] = 255
    columns = {True: set(), False: set()}
    for flip in columns:
        transform = transform_for(config(augmentation="crop_flip", flip=flip), 16, True)
        torch.manual_seed(0)
        for _ in range(300):
            columns[flip] |= set(torch.nonzero(transform(image)[0])[:, 1].tolist())
    assert columns[False] == set(range(1, 10))
    assert columns[True] == set(range(1, 15))


def test_resized_crop_is_evaluated_on_the_centre():
    image = torch.zeros(3, 32, 32, dtype=torch.uint8)
    image[:, 2:-2, 2:-2] = 200
    result = transform_for(config(augmentation="resized_crop"), 28, False)(image)
    assert torch.equal(result, torch.full((3, 28, 28), 200, dtype=torch.uint8))


def test_the_window_is_chosen_by_size_and_seed_alone_and_gives_what_torchvision_gives():
    chosen = config(augmentation="resized_crop")
    transform = transform_for(chosen, 24, True)
    theirs = v2.Compose([v2.RandomResizedCrop(24, antialias=True), v2.RandomHorizontalFlip()])
    for seed in range(20):
        image = torch.from_numpy(np.array(picture(50, 70))).permute(2, 0, 1)
        torch.manual_seed(seed)
        expected = theirs(image)
        torch.manual_seed(seed)
        assert torch.equal(transform(image), expected)
        torch.manual_seed(seed)
        window = transform.window(70, 50)
        assert torch.equal(transform(image, window), expected)


@pytest.mark.parametrize("size", [(50, 70), (70, 50), (33, 33), (24, 200)])
def test_evaluation_windows_are_torchvisions_resize(size):
    image = torch.from_numpy(np.array(picture(*size))).permute(2, 0, 1)
    theirs = v2.Compose([v2.Resize(32, antialias=True), v2.CenterCrop(28)])
    ours = transform_for(config(augmentation="resized_crop"), 28, False)
    assert torch.equal(ours(image), theirs(image))
