"""Online estimates against exact values from per-sample gradients of a small network."""

from __future__ import annotations

import math

import pytest
import torch
from torch.func import functional_call, grad, vmap

from adaptive_platform.statistics import DifferencedMoments, StatisticsConfig, StepMoments
from adaptive_platform.statistics.gsnr import elementwise_gsnr


@pytest.fixture(scope="module")
def per_sample() -> torch.Tensor:
    """Gradients of every sample's loss, samples x parameters."""
    torch.manual_seed(3)
    net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    inputs = torch.randn(256, 6)
    labels = (inputs @ torch.randn(6, 3)).argmax(1)
    parameters = {name: p.detach() for name, p in net.named_parameters()}

    def loss(values: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(functional_call(net, values, (x[None],)), y[None])

    gradients = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, inputs, labels)
    return torch.cat([g.flatten(1) for g in gradients.values()], dim=1).double()


def drawn(per_sample: torch.Tensor, generator: torch.Generator, size: int) -> torch.Tensor:
    """A batch drawn with replacement, so that the whole set is the true distribution."""
    return per_sample[torch.randint(len(per_sample), (size,), generator=generator)]


def exact(per_sample: torch.Tensor) -> tuple[float, float]:
    mean = per_sample.mean(0)
    return float((per_sample - mean).square().sum(1).mean()), float(mean.square().sum())


def within(values: list[float], true: float, sigmas: float = 4.0) -> bool:
    seen = torch.tensor(values, dtype=torch.float64)
    return abs(float(seen.mean()) - true) < sigmas * float(seen.std()) / math.sqrt(len(values))


@pytest.mark.parametrize("sizes", [[8, 8], [4] * 4, [1] * 16, [2, 3, 5, 6]])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_steps_are_unbiased(per_sample: torch.Tensor, sizes: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    noise, signal = [], []
    for _ in range(600):
        batch = drawn(per_sample, generator, sum(sizes))
        micro = [part.mean(0).square().sum() for part in batch.split(sizes)]
        step = StepMoments(
            micro_sqnorm=float(sum(micro)) / len(sizes),
            inverse_microbatch=sum(1 / size for size in sizes) / len(sizes),
            num_microbatches=len(sizes),
            global_sqnorm=float(batch.mean(0).square().sum()),
            global_batch=len(batch),
        )
        noise.append(step.noise_trace)
        signal.append(step.signal_sqnorm)
    true_noise, true_signal = exact(per_sample)
    assert within(noise, true_noise)
    assert within(signal, true_signal)


def test_the_online_noise_scale_agrees_while_the_batch_grows(per_sample: torch.Tensor) -> None:
    generator = torch.Generator().manual_seed(0)
    estimator = StatisticsConfig(half_life_samples=50_000).build()
    for size in (16, 32, 64, 128):
        for _ in range(400):
            batch = drawn(per_sample, generator, size)
            estimator.update(
                StepMoments(
                    micro_sqnorm=float(batch.view(4, size // 4, -1).mean(1).square().sum()) / 4,
                    inverse_microbatch=4 / size,
                    num_microbatches=4,
                    global_sqnorm=float(batch.mean(0).square().sum()),
                    global_batch=size,
                )
            )
    noise, signal = exact(per_sample)
    summary = estimator.summary()
    assert summary.noise_scale == pytest.approx(noise / signal, rel=0.05)
    assert summary.gain(256, 16) == pytest.approx(
        (noise / 16 + signal) / (noise / 256 + signal), rel=0.05
    )


def test_the_differenced_estimate_is_right_where_weights_stand_still(
    per_sample: torch.Tensor,
) -> None:
    generator = torch.Generator().manual_seed(0)
    noise, signal = [], []
    for _ in range(2000):
        one, two = (drawn(per_sample, generator, size).mean(0) for size in (8, 16))
        moments = DifferencedMoments(
            difference_sqnorm=float((one - two).square().sum()),
            inner_product=float(one @ two),
            global_batch=16,
            previous_batch=8,
        )
        noise.append(moments.noise_trace)
        signal.append(moments.signal_sqnorm)
    true_noise, true_signal = exact(per_sample)
    assert within(noise, true_noise)
    assert within(signal, true_signal)


def test_elementwise_gsnr_of_many_devices_nears_the_exact_one(per_sample: torch.Tensor) -> None:
    generator = torch.Generator().manual_seed(0)
    size, count = 16, 4000
    devices = torch.stack([drawn(per_sample, generator, size).mean(0) for _ in range(count)])
    found = elementwise_gsnr(devices.sum(0), devices.square().sum(0), count)
    mean, variance = per_sample.mean(0), per_sample.var(0, correction=0) / size
    error = (found - mean.square() / variance).abs()
    # Standard error of mean^2/variance at ratio r is about 2 sqrt(r/count) for normal devices.
    allowed = 6 * (2 * (mean.square() / variance / count).sqrt() + 3 / count)
    assert bool((error < allowed).all())
