from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch

from adaptive_platform.statistics import StatisticsConfig, StepMoments


def layered_step(layers: list[torch.Tensor], sizes: list[int]) -> StepMoments:
    """Moments of a step from each layer's per-example gradients, samples x elements."""
    micro = [
        float(sum(part.mean(0).square().sum() for part in layer.split(sizes))) / len(sizes)
        for layer in layers
    ]
    whole = [float(layer.mean(0).square().sum()) for layer in layers]
    return StepMoments(
        micro_sqnorm=sum(micro),
        inverse_microbatch=sum(1 / size for size in sizes) / len(sizes),
        num_microbatches=len(sizes),
        global_sqnorm=sum(whole),
        global_batch=sum(sizes),
        layer_micro_sqnorms=tuple(micro),
        layer_global_sqnorms=tuple(whole),
    )


def test_recovers_each_layers_noise_scale_and_the_median_gsnr() -> None:
    generator = torch.Generator().manual_seed(0)
    noise, signal, width = [1.0, 0.5, 2.0], [0.3, 0.3, 0.3], 60
    estimator = StatisticsConfig(half_life_samples=10**6).build()
    for _ in range(600):
        layers = [
            g + s * torch.randn(16, width, generator=generator)
            for g, s in zip(signal, noise, strict=True)
        ]
        estimator.update(layered_step(layers, [4] * 4))
    true = [(s / g) ** 2 for g, s in zip(signal, noise, strict=True)]
    assert estimator.layer_noise_scales() == pytest.approx(true, rel=0.1)
    assert estimator.summary().gsnr == pytest.approx(1 / true[0], rel=0.1)


def test_layers_without_gradient_or_signal_do_not_decide() -> None:
    torch.manual_seed(0)
    plain = 1.0 + 0.1 * torch.randn(8, 5)
    opposed = torch.tensor([1.0, -1.0]).repeat(4)[:, None] * torch.ones(8, 5)
    estimator = StatisticsConfig().build()
    estimator.update(layered_step([plain, torch.zeros(8, 5), plain, opposed], [1] * 8))
    scales = estimator.layer_noise_scales()
    assert scales[1] is None
    assert scales[3] is None
    assert estimator.summary().gsnr == pytest.approx(1 / scales[0])


def test_signal_below_the_noise_reads_as_none_of_it() -> None:
    opposed = torch.tensor([1.0, -1.0]).repeat(4)[:, None] * torch.ones(8, 5)
    estimator = StatisticsConfig().build()
    estimator.update(layered_step([opposed, opposed], [1] * 8))
    assert estimator.summary().gsnr == 0.0


def test_no_layers_no_gsnr() -> None:
    estimator = StatisticsConfig().build()
    estimator.update(replace(layered_step([torch.randn(8, 5)], [2] * 4), layer_micro_sqnorms=()))
    assert estimator.summary().gsnr is None
    assert estimator.layer_noise_scales() == ()
    estimator.update(layered_step([torch.zeros(8, 5)], [2] * 4))
    assert estimator.summary().gsnr is None


def test_a_non_finite_layer_enters_nothing() -> None:
    step = layered_step([torch.randn(8, 5), torch.randn(8, 5)], [2] * 4)
    estimator = StatisticsConfig().build()
    estimator.update(step)
    before = estimator.layer_noise_scales()
    estimator.update(replace(step, layer_global_sqnorms=(1.0, math.nan)))
    assert estimator.layer_noise_scales() == before


def test_another_number_of_layers_is_refused() -> None:
    step = layered_step([torch.randn(8, 5), torch.randn(8, 5)], [2] * 4)
    estimator = StatisticsConfig().build()
    estimator.update(step)
    with pytest.raises(ValueError, match="1 layers measured, but 2 before"):
        estimator.update(layered_step([torch.randn(8, 5)], [2] * 4))
    with pytest.raises(ValueError, match="2 and 1 layers"):
        estimator.update(replace(step, layer_global_sqnorms=(1.0,)))


def test_layer_state_round_trips_exactly() -> None:
    steps = [layered_step([torch.randn(8, 5), torch.randn(8, 3)], [2] * 4) for _ in range(3)]
    original, restored = StatisticsConfig().build(), StatisticsConfig().build()
    original.update(steps[0])
    restored.load_state_dict(json.loads(json.dumps(original.state_dict())))
    for step in steps[1:]:
        original.update(step)
        restored.update(step)
    assert restored.state_dict() == original.state_dict()
    assert restored.summary() == original.summary()
