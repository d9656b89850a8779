"""Micro-batches dealt to workers in any way, even or not, give one step; layouts change nothing."""

from __future__ import annotations

import pytest
import torch
from ranks import with_reducers
from runs import assert_same, recipe, train
from torch import nn
from torch.nn import functional as F

from adaptive_platform.collectives.ring import RingConfig
from adaptive_platform.gradients.buckets import GradientBuckets
from adaptive_platform.gradients.buffers import SharedBuffers
from adaptive_platform.statistics import StatisticsConfig
from adaptive_platform.training.measured import RIDER_SLOTS
from adaptive_platform.training.step import Step

SIZES = {"even": [4, 4, 4, 4], "uneven": [1, 3, 5, 7]}
DEALS = {
    "4 x 1": [[0], [1], [2], [3]],
    "2 x 2": [[0, 1], [2, 3]],
    "1 x 4": [[0, 1, 2, 3]],
    "2, 1, 1": [[3, 0], [1], [2]],
    "3, 0, 1": [[2, 0, 1], [], [3]],
}
"""Micro-batches of each worker."""


def small_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(6, 6, 1),
        nn.Flatten(),
        nn.Linear(6 * 25, 4),
    )


def ten_steps(deal: list[list[int]], sizes: list[int], memory_format=torch.contiguous_format):
    """Estimates, gains and squared norms of ten steps, and the weights after them, on rank 0."""
    models = [small_net().to(memory_format=memory_format) for _ in deal]

    def work(reducer):
        model = models[reducer.rank]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
        buffers = SharedBuffers(model, shared=len(deal) > 1)
        buckets = GradientBuckets(
            model.named_parameters(), reducer.start, bucket_bytes=2000, rider_slots=RIDER_SLOTS,
            layers=True,
        )  # fmt: skip
        step = Step(optimizer, buckets, buffers, clip_norm=None)
        estimator = StatisticsConfig().build()
        generator = torch.Generator().manual_seed(1)
        seen = []
        for _ in range(10):
            images = torch.randn(sum(sizes), 3, 5, 5, generator=generator)
            labels = torch.randint(4, (sum(sizes),), generator=generator)
            parts = list(zip(images.split(sizes), labels.split(sizes), strict=True))
            mine = [parts[index] for index in deal[reducer.rank]]
            step.begin(
                global_batch=sum(sizes), microbatches=len(mine), loss_scale=1.0, measure=True
            )
            for x, y in mine:
                outputs = model(x.contiguous(memory_format=memory_format))
                step.backward(F.cross_entropy(outputs, y, reduction="none"), None)
            measured = step.gather(stop_requested=False, broken=0, fatal=False)
            estimator.update(measured.moments)
            summary = estimator.summary()
            gain = summary.gain(measured.trained, 4)
            optimizer.param_groups[0]["lr"] = 0.05 * gain
            step.commit(measured)
            seen.append(
                [
                    measured.grad_sqnorm,
                    measured.moments.micro_sqnorm,
                    summary.noise_trace,
                    summary.signal_sqnorm,
                    gain,
                    summary.gsnr,
                    *measured.moments.layer_micro_sqnorms,
                    *measured.moments.layer_global_sqnorms,
                ]
            )
        buckets.close()
        return seen, {name: p.detach().clone() for name, p in model.named_parameters()}

    return with_reducers(RingConfig(), len(deal), work)[0]


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_ten_steps_agree_however_the_microbatches_are_dealt(sizes):
    """F02, F06: to 1e-5, from squared norms to weights."""
    first, weights = ten_steps(DEALS["1 x 4"], sizes)
    assert max(values[4] for values in first) > 1.1, "no noise, no test"
    for name, deal in DEALS.items():
        steps, found = ten_steps(deal, sizes)
        for number, (one, other) in enumerate(zip(first, steps, strict=True)):
            assert other == pytest.approx(one, rel=1e-5, abs=1e-7), (name, number)
        assert_same(found, weights, 1e-5)


@pytest.mark.parametrize("deal", ["1 x 4", "2, 1, 1"])
def test_the_memory_layout_of_the_model_changes_nothing(deal):
    plain, weights = ten_steps(DEALS[deal], SIZES["uneven"])
    moved, found = ten_steps(DEALS[deal], SIZES["uneven"], torch.channels_last)
    for one, other in zip(plain, moved, strict=True):
        assert other == pytest.approx(one, rel=2e-5, abs=1e-6)
    assert_same(found, weights, 1e-5)


class Pictures(torch.utils.data.Dataset):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(2)
        self.inputs = torch.randn(100, 3, 5, 5, generator=generator)
        self.labels = torch.randint(4, (100,), generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int):
        return self.inputs[index], int(self.labels[index])


def run_with(world_size: int, *, channels_last: bool = False, **more):
    def net() -> nn.Module:
        layout = torch.channels_last if channels_last else torch.contiguous_format
        return small_net().to(memory_format=layout)

    config = recipe(
        "stop.epochs=1",
        "batch.global_batch=20",
        lr_rule={"kind": "adascale", "base_batch": 5, "clock": "samples"},
        **more,
    )
    return train(config, world_size=world_size, data=Pictures(), model=net)[0]


@pytest.mark.parametrize("channels_last", [False, True])
def test_one_and_five_workers_measure_the_same_in_any_layout(channels_last):
    """Twenty samples are five micro-batches of the same four, on one worker or on five."""
    one = run_with(1, microbatch=4)
    five = run_with(5, channels_last=channels_last)
    for a, b in zip(one.watcher.steps, five.watcher.steps, strict=True):
        for name in ("grad_sqnorm", "noise_trace", "signal_sqnorm", "gain", "lr", "gsnr"):
            assert getattr(b, name) == pytest.approx(getattr(a, name), rel=1e-5, abs=1e-6), name
    assert_same(five.weights, one.weights, 1e-5)


@pytest.mark.parametrize("world_size", [2, 3, 4, 5])
def test_with_a_fixed_rate_any_number_of_workers_in_any_layout_gives_the_same_weights(world_size):
    """Micro-batches differ between these, so noise does too, but never the gradient."""
    fixed = {"lr_rule": {"kind": "none"}}
    config = recipe("stop.epochs=1", "batch.global_batch=20", "microbatch=3", **fixed)
    one = train(config, data=Pictures(), model=small_net)[0]
    many = train(
        config,
        world_size=world_size,
        data=Pictures(),
        model=lambda: small_net().to(memory_format=torch.channels_last),
    )[0]
    norms = [[r.grad_sqnorm for r in run.watcher.steps] for run in (one, many)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)
    assert_same(many.weights, one.weights, 1e-5)
