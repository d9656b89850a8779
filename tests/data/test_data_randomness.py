import random

import numpy as np
import torch

from adaptive_platform.data.randomness import SampleRandomness


def draw():
    return torch.rand(1).item(), random.random(), float(np.random.random_sample())


def test_seeded_inside_and_as_before_outside():
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    undisturbed = [draw(), draw()]
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    first = draw()
    with SampleRandomness(foreign=True) as randomness:
        randomness.seed(2**64 - 1)
        one = draw()
        randomness.seed(5)
        other = draw()
        randomness.seed(2**64 - 1)
        assert draw() == one
    assert all(a != b for a, b in zip(one, other, strict=True))
    assert [first, draw()] == undisturbed


def test_other_libraries_are_left_alone_unless_asked():
    random.seed(3)
    expected = random.random()
    random.seed(3)
    with SampleRandomness(foreign=False) as randomness:
        randomness.seed(1)
        assert random.random() == expected
