"""Batch normalization: which batch it needs, and averages that agree on all workers."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from adaptive_platform.models import (
    ModelConfig,
    TrainingMode,
    average_normalization,
    in_eval_mode,
    is_convolutional,
    normalization_buffers,
    smallest_microbatch,
)


def average_all(models: list[nn.Module], weights: list[float]) -> None:
    """Play all workers in turn: first collect what each sends, then give everyone the sum."""
    sent: list[Tensor] = []
    for model, weight in zip(models, weights, strict=True):
        average_normalization(copy.deepcopy(model), sent.append, weight)
    total = torch.stack([part.clone() for part in sent]).sum(0)

    def all_reduce(flat: Tensor) -> None:
        flat.copy_(total)

    for model, weight in zip(models, weights, strict=True):
        average_normalization(model, all_reduce, weight)


def keep(_: Tensor) -> None:
    """A single worker's all-reduce."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(3, momentum=None)
        self.register_buffer("level", torch.zeros(2))
        self.register_buffer("mask", torch.tensor([True, False]))


def test_worked_example() -> None:
    models: list[nn.Module] = [nn.BatchNorm1d(1, momentum=1.0) for _ in range(2)]
    for model, mean, var in zip(models, (2.0, 6.0), (1.0, 1.0), strict=True):
        model.running_mean.fill_(mean)
        model.running_var.fill_(var)
    average_all(models, [2, 2])
    for model in models:
        assert model.running_mean.item() == 4.0
        assert model.running_var.item() == 5.0


@given(st.lists(st.integers(0, 6), min_size=1, max_size=5).filter(any), st.integers(0, 2**31))
def test_pooled_statistics_are_those_of_all_samples(shares: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    samples = [torch.randn(n, 3) * 2 + torch.randn(3) for n in shares]
    models: list[nn.Module] = [Net() for _ in shares]
    for model, part in zip(models, samples, strict=True):
        model.bn.running_mean.copy_(part.mean(0) if len(part) else torch.full((3,), torch.nan))
        model.bn.running_var.copy_(
            part.var(0, unbiased=False) if len(part) else torch.full((3,), torch.nan)
        )
        model.level.fill_(len(part))
        model.bn.num_batches_tracked.fill_(len(part))
    average_all(models, [float(n) for n in shares])
    joined = torch.cat(samples)
    level = sum(n * n for n in shares) / sum(shares)
    for model in models:
        torch.testing.assert_close(model.bn.running_mean, joined.mean(0), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            model.bn.running_var, joined.var(0, unbiased=False), rtol=1e-4, atol=1e-5
        )
        torch.testing.assert_close(model.level, torch.full((2,), level))
        assert model.bn.num_batches_tracked.item() == round(level)
        assert model.mask.tolist() == [True, False]
    for model in models[1:]:
        for name, value in model.state_dict().items():
            assert torch.equal(value, models[0].state_dict()[name]), name


def test_without_weight_anywhere_all_stay_as_they_are() -> None:
    model = nn.BatchNorm1d(2)
    model(torch.randn(8, 2))
    before = copy.deepcopy(model.state_dict())
    average_normalization(model, keep, 0)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_one_worker_keeps_its_bits() -> None:
    model = ModelConfig(name="resnet8_cifar").build(10, seed=0)
    model(torch.randn(8, 3, 32, 32))
    before = copy.deepcopy(model.state_dict())
    average_normalization(model, keep, 7)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_one_reduction_and_none_without_buffers() -> None:
    calls: list[int] = []
    reduce: Callable[[Tensor], None] = lambda flat: calls.append(flat.numel())  # noqa: E731
    average_normalization(nn.Linear(2, 2), reduce, 1)
    assert calls == []
    average_normalization(nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm2d(4)), reduce, 1)
    assert calls == [2 * 3 + 1 + 2 * 4 + 1 + 1]


def test_buffers_can_be_put_back_after_a_dropped_step() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    kept = {name: value.clone() for name, value in normalization_buffers(model).items()}
    assert set(kept) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    model(torch.full((2, 3, 4, 4), torch.nan))
    assert model[1].running_mean.isnan().all()
    for name, buffer in normalization_buffers(model).items():
        buffer.copy_(kept[name])
    assert model[1].running_mean.eq(0).all()
    assert set(normalization_buffers(nn.BatchNorm1d(2))) >= {"running_mean"}


def test_smallest_microbatch() -> None:
    resnet = ModelConfig(name="resnet18").build(10, seed=0)
    assert smallest_microbatch(resnet) == 2
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        resnet(torch.randn(1, 3, 32, 32))
    assert resnet(torch.randn(2, 3, 32, 32)).shape == (2, 10)
    assert smallest_microbatch(resnet.eval()) == 1
    assert smallest_microbatch(nn.BatchNorm1d(2, track_running_stats=False).eval()) == 2
    assert smallest_microbatch(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))) == 1


def test_what_counts_as_a_convolution_net() -> None:
    assert is_convolutional(ModelConfig(name="resnet8_cifar").build(10, seed=0))
    patches, encoder = nn.Conv2d(3, 8, 16, 16), nn.TransformerEncoderLayer(8, 2)
    assert not is_convolutional(nn.Sequential(patches, nn.Flatten(2), encoder))


def test_modes_come_back_module_by_module() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout())
    model[1].eval()
    mode = TrainingMode(model)
    with in_eval_mode(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == [True, True, False, True]
    model.eval()
    mode.apply()
    assert [module.training for module in model.modules()] == [True, True, False, True]
