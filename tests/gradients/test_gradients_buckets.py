"""Buckets: layout, measured norms, strides, the rider, and what hooks leave behind."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from adaptive_platform.errors import UserError
from adaptive_platform.gradients.buckets import GradientBuckets
from adaptive_platform.gradients.layout import bucket_layout


class Alone:
    """A reduction among one worker that remembers the order of its calls."""

    def __init__(self) -> None:
        self.started: list[int] = []

    def __call__(self, buffer):
        self.started.append(buffer.numel())
        return self

    def wait(self) -> None:
        pass


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(64, 3)
    )


def buckets_of(model, start=None, bucket_bytes=1024):
    return GradientBuckets(
        model.named_parameters(), start or Alone(), bucket_bytes=bucket_bytes, rider_slots=3
    )


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=50), st.integers(0, 2000))
def test_layout_covers_each_parameter_once_in_backward_order(sizes, limit):
    layout = bucket_layout(sizes, limit)
    assert [i for bucket in layout for i in bucket] == list(reversed(range(len(sizes))))
    for bucket in layout[:-1]:
        assert sum(sizes[i] for i in bucket) >= limit
        assert sum(sizes[i] for i in bucket[:-1]) < limit or limit == 0


def test_fusion_pools_of_the_sheet():
    """Jia et al.: ready order 1, 2, 3, 4 MB with a threshold of 4 gives [1, 2, 3], [4]."""
    assert bucket_layout([4, 3, 2, 1], 4) == [[3, 2, 1], [0]]
    assert len(bucket_layout([4, 3, 2, 1], 0)) == 4
    assert len(bucket_layout([4, 3, 2, 1], 10**9)) == 1


@pytest.mark.parametrize("bucket_bytes", [1, 1024, 10**9])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_gradients_and_norms_equal_plain_autograd(bucket_bytes, memory_format):
    model = net().to(memory_format=memory_format)
    plain = net()
    inputs = [torch.randn(2, 3, 8, 8) for _ in range(3)]
    start = Alone()
    buckets = buckets_of(model, start, bucket_bytes)
    buckets.begin_step(measure=True)
    total = {name: torch.zeros_like(p) for name, p in plain.named_parameters()}
    for index, x in enumerate(inputs):
        buckets.begin_microbatch(last=index == 2)
        model(x).square().sum().backward()
        measured = buckets.end_microbatch()
        plain.zero_grad()
        plain(x).square().sum().backward()
        expected = sum(float(p.grad.double().square().sum()) for p in plain.parameters())
        assert float(measured) == pytest.approx(expected, rel=1e-5)
        for name, p in plain.named_parameters():
            total[name] += p.grad
    sqnorm = buckets.finish()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, total[name], rtol=1e-5, atol=1e-5)
        assert p.grad.stride() == p.stride()
    assert float(sqnorm) == pytest.approx(
        sum(float(t.double().square().sum()) for t in total.values()), rel=1e-5
    )
    assert sum(start.started) * 4 == buckets.num_bytes
    buckets.release()
    assert all(p.grad is None for p in model.parameters())


def test_rider_travels_with_the_last_bucket_only():
    model = net()
    start = Alone()
    buckets = buckets_of(model, start, 1)
    buckets.begin_step(measure=True)
    buckets.begin_microbatch(last=True)
    model(torch.randn(1, 3, 8, 8)).sum().backward()
    assert len(start.started) == len(buckets._buckets) - 1
    buckets.end_microbatch()
    buckets.rider.copy_(torch.tensor([1.0, 2.0, 3.0]))
    buckets.finish()
    assert buckets.rider.tolist() == [1.0, 2.0, 3.0]
    parameters = list(model.parameters())
    assert start.started[-1] == parameters[0].numel() + 3 + len(parameters)


def test_a_worker_without_microbatches_sends_zeros():
    model = net()
    buckets = buckets_of(model)
    for size in (1, 0):
        buckets.begin_step(measure=True)
        if size:
            buckets.begin_microbatch(last=True)
            model(torch.randn(1, 3, 8, 8)).sum().backward()
            buckets.end_microbatch()
        sqnorm = float(buckets.finish())
        assert (sqnorm > 0) == bool(size)
        buckets.release()


def test_first_nonfinite_is_named_in_registration_order():
    model = net()
    buckets = buckets_of(model)
    buckets.begin_step(measure=False)
    buckets.finish()
    assert buckets.first_nonfinite() is None
    model[2].weight.grad[0, 0, 0, 0] = float("nan")
    model[4].bias.grad[0] = float("inf")
    assert buckets.first_nonfinite() == "2.weight"


def test_closing_removes_the_hooks():
    model = net()
    buckets = buckets_of(model)
    buckets.close()
    model(torch.randn(1, 3, 8, 8)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_mixed_types_and_frozen_parameters():
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3).to(torch.bfloat16)})
    model["a"].bias.requires_grad_(False)
    buckets = buckets_of(model)
    assert buckets.names == ["a.weight", "b.weight", "b.bias"]
    buckets.begin_step(measure=True)
    buckets.begin_microbatch(last=True)
    (model["a"](torch.ones(1, 3)).sum() + model["b"](torch.ones(1, 3).bfloat16()).sum()).backward()
    measured = float(buckets.end_microbatch())
    assert float(buckets.finish()) == pytest.approx(measured)
    assert model["b"].weight.grad.dtype is torch.bfloat16


def test_nothing_to_train_is_refused():
    with pytest.raises(UserError, match="no parameter that requires a gradient"):
        buckets_of(nn.Flatten())


def test_inexact_gradients_leave_the_rider_to_itself():
    model, exact, narrowed = net(), Alone(), Alone()
    buckets = GradientBuckets(
        model.named_parameters(),
        exact,
        bucket_bytes=1024,
        rider_slots=3,
        start_gradients=narrowed,
    )
    buckets.begin_step(measure=True)
    buckets.begin_microbatch(last=True)
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    buckets.end_microbatch()
    buckets.finish()
    assert exact.started == [3 + len(buckets.parameters)]
    assert sum(narrowed.started) == sum(p.numel() for p in buckets.parameters)
