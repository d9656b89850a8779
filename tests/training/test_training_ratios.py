"""Ratios on shards: every plan and number of workers gives what one process would compute."""

from __future__ import annotations

import pytest
import torch
from ranks import with_reducers
from torch import nn

from adaptive_platform.collectives import Reducer, ReducerConfig
from adaptive_platform.gradients import intake, shards
from adaptive_platform.gradients.buckets import GradientBuckets
from adaptive_platform.settings import variants_of
from adaptive_platform.statistics import VarianceReductionConfig
from adaptive_platform.statistics.gsnr import gsnr_of_means, reduction_ratio
from adaptive_platform.training.ratios import Ratios, ReducerHalves

VARIANTS = sorted(variants_of(ReducerConfig))
SHAPES = ((7, 3), (5,), (1,), (0, 4), (3, 2, 3, 3), (2, 5), (61,))
GAMMA, MOMENTUM = 0.1, 0.9
TOLERANCE = 1e-5
"""A variance is a small difference of two sums, so float32's 6e-8 grows in it up to so much here.
Between plans, where sums are the same bits, nothing but the order of a layer's mean differs."""


class Odd(nn.Module):
    """Parameters of uneven shapes, one of them channels_last and one empty."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in SHAPES)
        self.all[4].data = self.all[4].data.contiguous(memory_format=torch.channels_last)


def gradients(step: int, worker: int) -> list[torch.Tensor]:
    """Small whole numbers, so that sums are exact in any order."""
    generator = torch.Generator().manual_seed(97 * step + worker)
    return [torch.randint(-4, 5, shape, generator=generator).float() for shape in SHAPES]


def push(model: Odd, buckets: GradientBuckets, step: int, worker: int, *, last: bool) -> None:
    buckets.begin_microbatch(last=last)
    pairs = zip(model.all, gradients(step, worker), strict=True)
    torch.stack([(p * g).sum() for p, g in pairs]).sum().backward()
    buckets.end_microbatch()


def ratios_of(step: int, devices: int) -> list[torch.Tensor]:
    each = [gradients(step, d) for d in range(devices)]
    found = []
    for parts in zip(*each, strict=True):
        stacked = torch.stack(parts).double()
        mean, square = stacked.mean(dim=0), stacked.square().mean(dim=0)
        found.append(reduction_ratio(gsnr_of_means(mean, square), GAMMA).float())
    return found


class Silent:
    def warn_once(self, text: str) -> None:
        raise AssertionError(text)


def config_of(kind: str) -> ReducerConfig:
    cls = variants_of(ReducerConfig)[kind]
    return cls(
        timeout_seconds=20, **({"segment_kib": 4} if "segment_kib" in cls.model_fields else {})
    )


@pytest.mark.parametrize("kind", VARIANTS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_three_steps_with_every_plan(kind, world_size):
    """A refresh, a step with its ratios, and another refresh, which is smoothed."""
    three_steps(kind, world_size)


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_shard_may_be_worked_on_in_many_portions(world_size, monkeypatch):
    """As a CPU does with large ones, gradients arriving one by one; layers then span portions."""
    monkeypatch.setattr(intake, "_CACHED_BYTES", 1)
    monkeypatch.setattr(shards, "_LONGEST", 4)
    three_steps("ring", world_size)


def three_steps(kind, world_size):
    passes = 2 if world_size == 1 else 1
    devices = passes * world_size

    def body(reducer: Reducer) -> list[tuple[list[torch.Tensor], float, list[float]]]:
        model = Odd()
        buckets = GradientBuckets(
            model.named_parameters(),
            reducer.start,
            bucket_bytes=100,
            rider_slots=1,
            layers=True,
            halves=ReducerHalves(reducer, None),
        )
        variance = VarianceReductionConfig(every=2, gamma=GAMMA).build(for_betas=True)
        number = [0]
        ratios = Ratios(variance, buckets, reducer, Silent(), lambda: number[0])
        history = []
        for step in range(3):
            number[0] = step
            due = variance.due(step)
            reshape = ratios.begin(refreshing=due)
            buckets.begin_step(measure=True, squares=due, reshape=reshape)
            for turn in range(passes):
                worker = passes * reducer.rank + turn
                push(model, buckets, step, worker, last=turn == passes - 1)
            sqnorm = float(buckets.finish())
            if due:
                # Squares are plain sums here: mean^2 / mean square = total^2 / (devices * squares).
                ratios.refresh(devices, 1.0 / devices)
            layers = buckets.in_model_order(buckets.summed_layer_sqnorms.tolist())
            history.append(([p.grad.clone() for p in model.all], sqnorm, layers))
        ratios.make_whole()
        assert variance.whole is not None
        assert set(variance.whole) == set(buckets.names)
        before = [average.clone() for average in variance.averages]
        ratios.begin(refreshing=False)
        for one, other in zip(before, variance.averages, strict=True):
            assert torch.equal(one, other)
        buckets.close()
        return history

    results = with_reducers(config_of(kind), world_size, body)
    if world_size == 1:
        results = results[:1]
    first, third = ratios_of(0, devices), ratios_of(2, devices)
    averages = [r * (1 - MOMENTUM) for r in first]
    corrected = [a / (1 - MOMENTUM) for a in averages]
    expected_ratios = [corrected, corrected]
    later = [MOMENTUM * a + (1 - MOMENTUM) * r for a, r in zip(averages, third, strict=True)]
    expected_ratios.append([a / (1 - MOMENTUM**2) for a in later])
    for step in range(3):
        totals = [
            torch.stack(parts).sum(dim=0)
            for parts in zip(*(gradients(step, d) for d in range(devices)), strict=True)
        ]
        norms = [float(total.square().sum()) for total in totals]
        for found, sqnorm, layers in (result[step] for result in results):
            for one, total, ratio in zip(found, totals, expected_ratios[step], strict=True):
                torch.testing.assert_close(one, total * ratio, rtol=TOLERANCE, atol=1e-6)
            assert layers == pytest.approx(norms, rel=1e-5)
            assert sqnorm == pytest.approx(sum(norms), rel=1e-5)


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_refresh_costs_half_a_gradient_more_and_other_steps_nothing(world_size):
    """Beside the rider and one number per layer."""

    def body(reducer: Reducer) -> list[int]:
        model = nn.Linear(240, 100, bias=False)
        buckets = GradientBuckets(
            model.named_parameters(),
            reducer.start,
            bucket_bytes=10**6,
            rider_slots=1,
            halves=ReducerHalves(reducer, None),
        )
        variance = VarianceReductionConfig(every=2).build(for_betas=False)
        number = [0]
        ratios = Ratios(variance, buckets, reducer, Silent(), lambda: number[0])
        sent = []
        for step in range(2):
            number[0] = step
            due = variance.due(step)
            reshape = ratios.begin(refreshing=due)
            before = reducer.bytes_sent
            buckets.begin_step(measure=True, squares=due, reshape=reshape)
            buckets.begin_microbatch(last=True)
            model(torch.randn(2, 240)).sum().backward()
            buckets.end_microbatch()
            buckets.finish()
            if due:
                ratios.refresh(world_size, 1.0 / world_size)
            sent.append(reducer.bytes_sent - before)
        buckets.close()
        return sent

    whole = 2 * 4 * 24_000 * (world_size - 1) // world_size
    for refreshing, plain in with_reducers(config_of("ring"), world_size, body):
        assert whole <= plain < 1.01 * whole
        assert 1.5 * whole <= refreshing < 1.51 * whole
