"""Measuring asks the device for no number while a step runs, and needs next to no memory."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from adaptive_platform.gradients.buckets import GradientBuckets
from adaptive_platform.optimizers import AdamPreconditioner


class Watching(TorchDispatchMode):
    """Names of operations that wait for the device, and the bytes of all tensors made."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.made_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            self.waits.append(str(func))
        given = {a.untyped_storage().data_ptr() for a in _tensors([args, kwargs])}
        for tensor in _tensors(found):
            if tensor.untyped_storage().data_ptr() not in given:
                self.made_bytes += tensor.untyped_storage().nbytes()
        return found


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


class Alone:
    def __call__(self, buffer):
        return self

    def wait(self) -> None:
        pass


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])


@contextmanager
def no_reading(monkeypatch):
    def refuse(*_):
        raise AssertionError("a tensor was read on the host")

    with monkeypatch.context() as patch:
        for name in ("tolist", "item", "cpu", "numpy"):
            patch.setattr(torch.Tensor, name, refuse)
        yield


def step(model, buckets, *, measure: bool, monkeypatch) -> Watching:
    """Two micro-batches and the sum, watched."""
    inputs = torch.randn(8, 64)
    with Watching() as watching, no_reading(monkeypatch):
        buckets.begin_step(measure=measure)
        for last in (False, True):
            buckets.begin_microbatch(last=last)
            model(inputs).square().sum().backward()
            buckets.end_microbatch()
        buckets.finish()
    buckets.release()
    return watching


@pytest.mark.parametrize("layers", [False, True])
def test_norms_wait_for_nothing_and_need_less_than_one_bucket(layers, monkeypatch):
    model = net()
    buckets = GradientBuckets(
        model.named_parameters(), Alone(), bucket_bytes=20_000, rider_slots=3, layers=layers
    )
    plain = step(model, buckets, measure=False, monkeypatch=monkeypatch)
    measured = step(model, buckets, measure=True, monkeypatch=monkeypatch)
    assert plain.waits == measured.waits == []
    # Everything that measuring makes, though most of it is let go at once.
    assert 0 < measured.made_bytes - plain.made_bytes < 20_000


def test_the_preconditioner_waits_for_nothing_while_the_step_runs(monkeypatch):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(5):
        model(torch.randn(8, 64)).square().sum().backward()
        optimizer.step()
    model.zero_grad()
    preconditioner = AdamPreconditioner(optimizer)
    buckets = GradientBuckets(
        model.named_parameters(),
        Alone(),
        bucket_bytes=20_000,
        rider_slots=3,
        preconditioner=preconditioner,
    )
    # Adam counts its steps on the host; reading them waits for no device.
    monkeypatch.setattr(preconditioner, "begin", lambda: None)
    AdamPreconditioner.begin(preconditioner)
    watching = step(model, buckets, measure=True, monkeypatch=monkeypatch)
    assert buckets.preconditioned
    assert watching.waits == []
