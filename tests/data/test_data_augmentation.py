import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from adaptive_platform.data.augmentation import is_random, normalized, transform_for
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


def test_normalization_equals_torchvisions_and_gray_becomes_three_channels():
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
    pixels = torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8)
    columns = torch.tensor(mean).view(3, 1, 1), torch.tensor(std).view(3, 1, 1)
    expected = v2.functional.normalize(pixels.float() / 255, mean, std)
    assert torch.allclose(normalized(pixels, *columns), expected, atol=1e-6)
    gray = normalized(pixels[:, :1], *columns)
    assert gray.shape == (4, 3, 8, 8)
    assert torch.allclose(gray, normalized(pixels[:, :1].expand(-1, 3, -1, -1), *columns))
