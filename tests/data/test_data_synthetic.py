import pytest
import torch

from adaptive_platform.data.synthetic import SyntheticConfig
from adaptive_platform.errors import DataError


def test_made_from_the_seed_alone():
    torch.manual_seed(1)
    first = SyntheticConfig(samples=300, data_seed=3).open()
    torch.manual_seed(2)
    second = SyntheticConfig(samples=300, data_seed=3).open()
    other = SyntheticConfig(samples=300, data_seed=4).open()
    assert torch.equal(first.train.pixels, second.train.pixels)
    assert torch.equal(first.eval.pixels, second.eval.pixels)
    assert not torch.equal(first.train.pixels, other.train.pixels)


def test_learnable_the_nearest_class_mean_of_training_finds_held_out_labels():
    source = SyntheticConfig(samples=400, eval_samples=100, num_classes=4, image_size=16).open()
    flat = source.train.pixels.float().flatten(1)
    means = torch.stack([flat[source.train.labels == k].mean(0) for k in range(4)])
    guesses = torch.cdist(source.eval.pixels.float().flatten(1), means).argmin(1)
    assert (guesses == source.eval.labels).float().mean() > 0.98


def test_label_noise_touches_training_labels_only():
    clean = SyntheticConfig(samples=1000, num_classes=10).open()
    noisy = SyntheticConfig(samples=1000, num_classes=10, label_noise=0.5).open()
    wrong = (clean.train.labels != noisy.train.labels).float().mean().item()
    assert wrong == pytest.approx(0.45, abs=0.06), "a random class is right one time in ten"
    assert torch.equal(clean.eval.labels, noisy.eval.labels)


def test_no_held_out_part_and_too_large():
    assert SyntheticConfig(samples=4, eval_samples=0).open().eval is None
    with pytest.raises(DataError, match=r"data.samples = 1000000: .*Lower"):
        SyntheticConfig(samples=1_000_000, image_size=224).open()
