from __future__ import annotations

import pytest
import torch

from adaptive_platform.statistics import VarianceReductionConfig

MEAN, MEAN_SQUARE = torch.tensor([1.1, 1.0, 1.0]), torch.tensor([1.22, 2.0, 5.0])
"""Two devices, (1, 2, 3) and (1.2, 0, -1): the worked example of the fact sheet."""


def reduced(variance) -> torch.Tensor:
    gradient = MEAN.clone()
    variance.apply([("w", gradient)])
    return gradient


@pytest.mark.parametrize("for_betas", [False, True])
def test_first_refresh_gives_the_worked_example(for_betas: bool) -> None:
    variance = VarianceReductionConfig().build(for_betas=for_betas)
    assert torch.equal(reduced(variance), MEAN)
    variance.refresh(0, [("w", MEAN, MEAN_SQUARE)], 2)
    torch.testing.assert_close(reduced(variance), torch.tensor([1.1, 0.1, 0.1]))


def test_ratios_are_smoothed_for_adam_and_bias_corrected() -> None:
    variance = VarianceReductionConfig().build(for_betas=True)
    variance.refresh(0, [("w", MEAN, MEAN_SQUARE)], 2)
    # Devices that agree: the ratio is 1 throughout.
    variance.refresh(1, [("w", MEAN, MEAN.square())], 2)
    weight = 0.1 / (1 - 0.9**2)
    expected = torch.tensor([1.0, *[weight * (0.9 * 0.1 + 1.0)] * 2]) * MEAN
    torch.testing.assert_close(reduced(variance), expected)
    plain = VarianceReductionConfig().build(for_betas=False)
    plain.refresh(0, [("w", MEAN, MEAN_SQUARE)], 2)
    plain.refresh(1, [("w", MEAN, MEAN.square())], 2)
    torch.testing.assert_close(reduced(plain), MEAN)


def test_due_at_the_interval_and_until_the_first() -> None:
    variance = VarianceReductionConfig(every=3).build(for_betas=False)
    assert variance.due(0)
    assert variance.due(1)
    variance.refresh(1, [("w", MEAN, MEAN_SQUARE)], 2)
    assert [variance.due(step) for step in (2, 3, 4)] == [False, False, True]


def test_gamma_one_is_exactly_plain() -> None:
    variance = VarianceReductionConfig(gamma=1.0).build(for_betas=False)
    variance.refresh(0, [("w", MEAN, MEAN_SQUARE)], 2)
    assert torch.equal(reduced(variance), MEAN)


def test_state_comes_back_bit_for_bit() -> None:
    variance = VarianceReductionConfig(every=2).build(for_betas=True)
    for step in range(3):
        variance.refresh(step, [("w", MEAN * (step + 1), MEAN_SQUARE + step)], 2)
    other = VarianceReductionConfig(every=2).build(for_betas=True)
    other.load_state_dict(variance.state_dict(), torch.device("cpu"))
    assert torch.equal(reduced(other), reduced(variance))
    assert [other.due(s) for s in (3, 4)] == [variance.due(s) for s in (3, 4)] == [False, True]
