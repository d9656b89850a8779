"""Precision and losses: the scale as a value, sums instead of means, smoothing."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adaptive_platform.gradients.loss import LossConfig, correct_predictions
from adaptive_platform.gradients.precision import LossScale, PrecisionConfig


def test_scale_halves_on_overflow_and_doubles_after_good_steps():
    scale = PrecisionConfig(
        dtype="float16", loss_scale=8.0, loss_scale_growth_steps=2
    ).first_scale()
    assert scale.after(overflow=True).value == 4.0
    grown = scale.after(overflow=False).after(overflow=False)
    assert (grown.value, grown.good_steps) == (16.0, 0)
    reset = scale.after(overflow=False).after(overflow=True).after(overflow=False)
    assert (reset.value, reset.good_steps) == (4.0, 1)
    assert LossScale(**reset.state_dict()) == reset


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_types_keep_the_scale_at_one(dtype):
    scale = PrecisionConfig(dtype=dtype).first_scale()
    assert scale.after(overflow=True).after(overflow=False).value == 1.0


def test_autocast_is_what_it_says():
    with PrecisionConfig(dtype="bfloat16").autocast("cpu"):
        assert torch.nn.Linear(2, 2)(torch.ones(1, 2)).dtype is torch.bfloat16
    with PrecisionConfig().autocast("cpu"):
        assert torch.nn.Linear(2, 2)(torch.ones(1, 2)).dtype is torch.float32


def test_label_smoothing_of_the_sheet():
    """Logits (2, 0, 0, 0), target 0: CE 0.340753, smoothed by 0.1 0.490753."""
    outputs, targets = torch.tensor([[2.0, 0.0, 0.0, 0.0]]), torch.tensor([0])
    assert float(LossConfig().build()(outputs, targets)) == pytest.approx(0.340753, abs=1e-6)
    smoothed = LossConfig(label_smoothing=0.1)
    assert float(smoothed.build()(outputs, targets)) == pytest.approx(0.490753, abs=1e-6)
    assert float(smoothed.build_evaluation()(outputs, targets)) == pytest.approx(0.340753, abs=1e-6)


@given(st.floats(0, 0.9), st.integers(2, 6))
def test_equal_logits_cost_the_logarithm_of_the_classes(smoothing, classes):
    losses = LossConfig(label_smoothing=smoothing).build()(
        torch.zeros(3, classes), torch.arange(3) % classes
    )
    assert losses.tolist() == pytest.approx([math.log(classes)] * 3, rel=1e-5)


def test_right_predictions_are_counted_only_where_there_are_classes():
    outputs = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    assert float(correct_predictions(outputs, torch.tensor([0, 1, 1]))) == 2.0
    assert correct_predictions(outputs, torch.tensor([0.5, 1.0, 1.0])) is None
    assert correct_predictions(torch.zeros(3), torch.tensor([0, 1, 1])) is None


def test_a_run_that_goes_on_keeps_its_scale_only_in_the_same_kind_of_number():
    half = PrecisionConfig(dtype="float16", loss_scale=1024.0, loss_scale_growth_steps=50)
    moved = LossScale(value=256.0, growth_steps=2000, good_steps=7)
    fixed = PrecisionConfig().first_scale()
    assert half.first_scale().going_on(moved) == LossScale(
        value=256.0, growth_steps=50, good_steps=7
    )
    assert half.first_scale().going_on(fixed) == half.first_scale()
    assert fixed.going_on(moved) == fixed
