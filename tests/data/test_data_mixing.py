"""Mixup, running mixup and erasing as functions: the sheet's example, ranges, and who decides."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from adaptive_platform.data.mixing import (
    ErasingConfig,
    class_shares,
    erased,
    mixed,
    mixing_weights,
)


def test_running_mixup_with_constant_weight() -> None:
    """Osawa et al. 2020: inputs 1, 0, 0, 0 with weight 0.7 decay as 1, 0.3, 0.09, 0.027."""
    inputs = [torch.tensor([[x]]) for x in (1.0, 0.0, 0.0, 0.0)]
    targets = [class_shares(torch.tensor([t]), 2) for t in (0, 1, 1, 1)]
    weight = torch.tensor([0.7])
    before = inputs[0][:0], targets[0][:0]
    found = []
    for x, y in zip(inputs, targets, strict=True):
        before = mixed(x, before[0], weight), mixed(y, before[1], weight)
        found.append(float(before[0]))
        assert float(before[1].sum()) == pytest.approx(1.0)
    assert found == pytest.approx([1.0, 0.3, 0.09, 0.027])


@given(st.integers(0, 2**31), st.integers(0, 9), st.floats(0.1, 2.0))
@settings(deadline=None, max_examples=30)
def test_weights_are_the_sample_s_own_and_the_larger_share(seed, epoch, alpha) -> None:
    ids = np.arange(20, dtype=np.int64)
    weights = mixing_weights(seed, epoch, ids, alpha)
    assert bool(((weights >= 0.5) & (weights <= 1.0)).all())
    assert torch.equal(mixing_weights(seed, epoch, ids[::-1].copy(), alpha), weights.flip(0))
    assert not torch.equal(mixing_weights(seed, epoch + 1, ids, alpha), weights)


def test_more_samples_than_the_batch_before_stay_as_they_are() -> None:
    values, others = torch.ones(3, 2), torch.zeros(2, 2)
    found = mixed(values, others, torch.tensor([0.5, 0.75, 0.5]))
    assert found[:, 0].tolist() == [0.5, 0.75, 1.0]
    assert values.sum() == 6
    assert mixed(values, torch.zeros(5, 2), torch.full((3,), 0.5)).shape == (3, 2)


@given(st.integers(0, 999), st.integers(4, 12), st.integers(4, 12))
@settings(deadline=None, max_examples=30)
def test_an_erased_rectangle_is_one_and_of_its_size(seed, height, width) -> None:
    images = torch.ones(8, 3, height, width)
    config = ErasingConfig(probability=1.0, area=(0.1, 0.3))
    found = erased(images, config, seed, 0, np.arange(8, dtype=np.int64))
    assert bool((images == 1).all())
    for image in found:
        assert torch.equal(image[0], image[2])
        blank = image[0] == 0
        rows, columns = blank.any(1).sum(), blank.any(0).sum()
        assert int(rows * columns) == int(blank.sum())
        assert float(blank.float().mean()) <= 0.3 + 0.5 * (height + width + 0.5) / height / width


def test_about_that_share_of_images_is_erased_alike_whoever_asks() -> None:
    images = torch.ones(400, 1, 16, 16)
    ids = np.arange(400, dtype=np.int64)
    found = erased(images, ErasingConfig(), 3, 1, ids)
    share = float((found == 0).flatten(1).any(1).float().mean())
    assert 0.4 < share < 0.6
    assert torch.equal(erased(images[:50], ErasingConfig(), 3, 1, ids[100:150]), found[100:150])


@pytest.mark.parametrize("fields", [{"area": (0.5, 0.2)}, {"area": (0, 1)}, {"aspect": (0, 1)}])
def test_ranges_that_are_none_are_refused(fields) -> None:
    with pytest.raises(ValidationError, match="least"):
        ErasingConfig(**fields)
