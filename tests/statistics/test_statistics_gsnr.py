from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adaptive_platform.statistics.gsnr import (
    elementwise_gsnr,
    gsnr_reduced_gradient,
    reduction_ratio,
)

DEVICES = torch.tensor([[1.0, 2.0, 3.0], [1.2, 0.0, -1.0]])


def sums(devices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    return devices.sum(0), devices.square().sum(0), len(devices)


def test_worked_example() -> None:
    ratio = elementwise_gsnr(*sums(DEVICES))
    torch.testing.assert_close(ratio, torch.tensor([121.0, 1.0, 0.25]), rtol=1e-4, atol=0)
    clipped = reduction_ratio(ratio)
    torch.testing.assert_close(clipped, torch.tensor([1.0, 0.1, 0.1]))
    reduced = gsnr_reduced_gradient(*sums(DEVICES))
    torch.testing.assert_close(reduced, torch.tensor([1.1, 0.1, 0.1]))


@given(st.floats(1e-6, 1e6), st.integers(0, 1000))
def test_scaling_the_gradient_scales_the_result(scale: float, seed: int) -> None:
    devices = torch.randn(8, 20, generator=torch.Generator().manual_seed(seed)) + 0.5
    plain, scaled = (
        gsnr_reduced_gradient(*sums(devices)),
        gsnr_reduced_gradient(*sums(scale * devices)),
    )
    torch.testing.assert_close(scaled, scale * plain, rtol=1e-3, atol=0)


def test_gamma_one_is_plain_sgd() -> None:
    torch.testing.assert_close(gsnr_reduced_gradient(*sums(DEVICES), gamma=1.0), DEVICES.mean(0))


@pytest.mark.parametrize("count", [2, 3, 7, 64])
def test_devices_that_agree_give_a_uniform_ratio(count: int) -> None:
    one = torch.tensor([1e-6, 0.1, 1 / 3, 700.0, -5.0])
    ratio = elementwise_gsnr(one * count, one.square() * count, count)
    assert bool(torch.isfinite(ratio).all())
    torch.testing.assert_close(reduction_ratio(ratio), torch.ones(5), rtol=0.3, atol=0)


def test_a_layer_without_gradient_gets_gamma() -> None:
    nothing = torch.zeros(3, 4)
    torch.testing.assert_close(
        reduction_ratio(elementwise_gsnr(*sums(nothing))), torch.full((4,), 0.1)
    )
    assert bool((gsnr_reduced_gradient(*sums(nothing)) == 0).all())


def test_pure_noise_has_a_ratio_of_one_over_k_minus_one() -> None:
    devices = torch.randn(9, 200_000, generator=torch.Generator().manual_seed(0))
    total, squares, count = sums(devices)
    mean = (total / count).square().mean()
    variance = (squares / count - (total / count).square()).mean()
    assert float(mean / variance) == pytest.approx(1 / 8, rel=0.03)
    # The ratio of elements is heavier than that of the means: E[F(1, 8)] / 8.
    ratio = elementwise_gsnr(total, squares, count)
    assert float(ratio.median()) < float(ratio.mean())


def test_a_shard_with_the_layers_mean_equals_the_whole_layer() -> None:
    ratio = elementwise_gsnr(*sums(torch.randn(8, 30) + 1))
    whole = reduction_ratio(ratio)
    shards = [reduction_ratio(part, layer_mean=ratio.mean()) for part in ratio.split(7)]
    torch.testing.assert_close(torch.cat(shards), whole)


def test_inputs_are_left_alone_and_half_precision_is_widened() -> None:
    total, squares, count = sums(DEVICES.half())
    copies = total.clone(), squares.clone()
    assert gsnr_reduced_gradient(total, squares, count).dtype == torch.float32
    assert torch.equal(total, copies[0])
    assert torch.equal(squares, copies[1])


def test_senseless_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="count = 1"):
        elementwise_gsnr(torch.ones(2), torch.ones(2), 1)
    for gamma in (0.0, 1.1):
        with pytest.raises(ValueError, match="gamma"):
            reduction_ratio(torch.ones(2), gamma)
