from __future__ import annotations

import pytest
import torch

from adaptive_platform.statistics import VarianceReduction, VarianceReductionConfig
from adaptive_platform.statistics.gsnr import gsnr_in_place

MEAN = torch.tensor([1.1, 1.0, 1.0])
"""Of two devices, (1, 2, 3) and (1.2, 0, -1): the worked example of the fact sheet."""


RATIO = torch.tensor([1.0, 0.1, 0.1])
"""What the example's squared signals over variances come to with gamma = 0.1."""
AGREEING = torch.ones(3)
"""The ratios of devices that agree."""


def reduced(variance: VarianceReduction) -> torch.Tensor:
    gradient = MEAN.clone()
    for start, stop in ((0, 1), (1, 3)):
        variance.apply(0, start, gradient[start:stop])
    return gradient


def refresh(variance: VarianceReduction, step: int, ratios: torch.Tensor) -> None:
    """Two portions of one shard."""
    variance.begin_refresh(step, [ratios])
    for start, stop in ((0, 1), (1, 3)):
        variance.take(0, start, ratios[start:stop])


@pytest.mark.parametrize("for_betas", [False, True])
def test_first_refresh_gives_the_worked_example(for_betas: bool) -> None:
    """From the sums of both devices to the reduced mean gradient."""
    variance = VarianceReductionConfig().build(for_betas=for_betas)
    total, squares = 2 * MEAN, torch.tensor([2.44, 4.0, 10.0])
    gsnr_in_place(total, squares, scale=1 / 2, scratch=torch.empty(5))
    refresh(variance, 0, squares / squares.mean())
    torch.testing.assert_close(reduced(variance), torch.tensor([1.1, 0.1, 0.1]))


def test_ratios_are_smoothed_for_adam_and_bias_corrected() -> None:
    variance = VarianceReductionConfig().build(for_betas=True)
    assert not variance.known
    refresh(variance, 0, RATIO)
    assert variance.known
    torch.testing.assert_close(reduced(variance), torch.tensor([1.1, 0.1, 0.1]))
    refresh(variance, 1, AGREEING)
    weight = 0.1 / (1 - 0.9**2)
    expected = torch.tensor([1.0, *[weight * (0.9 * 0.1 + 1.0)] * 2]) * MEAN
    torch.testing.assert_close(reduced(variance), expected)
    plain = VarianceReductionConfig().build(for_betas=False)
    refresh(plain, 0, RATIO)
    refresh(plain, 1, AGREEING)
    assert torch.equal(reduced(plain), MEAN)


def test_ratios_are_copied() -> None:
    """They lie in memory that the next squares are written to."""
    variance, ratios = VarianceReductionConfig().build(for_betas=False), RATIO.clone()
    refresh(variance, 0, ratios)
    ratios.zero_()
    torch.testing.assert_close(reduced(variance), torch.tensor([1.1, 0.1, 0.1]))


def test_due_at_the_interval_and_until_the_first() -> None:
    variance = VarianceReductionConfig(every=3).build(for_betas=False)
    assert variance.due(0)
    assert variance.due(1)
    refresh(variance, 1, RATIO)
    assert [variance.due(step) for step in (2, 3, 4)] == [False, False, True]


def test_whole_state_comes_back_bit_for_bit() -> None:
    variance = VarianceReductionConfig(every=2).build(for_betas=True)
    for step in range(3):
        refresh(variance, step, RATIO / (step + 1))
    variance.whole = {"w": variance.averages[0].clone()}
    other = VarianceReductionConfig(every=2).build(for_betas=True)
    other.load_state_dict(variance.state_dict(), torch.device("cpu"))
    other.forget_shards()
    assert other.whole is not None
    other.deal_out([other.whole["w"]])
    assert other.whole is None
    assert torch.equal(reduced(other), reduced(variance))
    assert [other.due(s) for s in (3, 4)] == [variance.due(s) for s in (3, 4)] == [False, True]


def test_shards_alone_make_a_fresh_start() -> None:
    """Where a worker is lost nobody has all ratios: none go on, here or for who joins."""
    variance = VarianceReductionConfig(every=5).build(for_betas=True)
    refresh(variance, 7, RATIO)
    joining = VarianceReductionConfig(every=5).build(for_betas=True)
    joining.load_state_dict(variance.state_dict(), torch.device("cpu"))
    variance.forget_shards()
    for one in (variance, joining):
        assert not one.known
        assert one.due(8)
