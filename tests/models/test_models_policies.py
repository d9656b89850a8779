"""Normalization policies: groups equal to the joined batch, ghosts, statistics for evaluation."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from natural_nets import on_ranks
from pydantic import ValidationError
from torch import nn

from adaptive_platform.models import (
    GhostNorm,
    GroupNorm,
    LocalNorm,
    ModelConfig,
    average_normalization,
    recompute_statistics,
)
from adaptive_platform.models.ghost_batches import ghost_sizes
from adaptive_platform.models.group_batch_norm import group_batch_norm, normalization_group


def new_norm() -> nn.BatchNorm2d:
    layer = nn.BatchNorm2d(3).double()
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([1.0, -2.0, 0.0]))
        layer.bias.copy_(torch.tensor([0.5, 0.0, -1.0]))
    return layer


def batch(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(count, 3, 4, 2, generator=generator, dtype=torch.float64) * 3 + 7
    return inputs, torch.randn(count, 3, 4, 2, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("shares", [[4, 4], [5, 1, 2], [8, 0], [1, 7]])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_group_equals_the_joined_batch_forward_and_backward(shares, layout) -> None:
    inputs, slopes = batch(sum(shares))
    joined = new_norm()
    whole = inputs.clone().requires_grad_()
    expected = joined(whole)
    (expected * slopes).sum().backward()

    def member(exchange):
        mine = inputs.split(shares)[exchange.rank].contiguous(memory_format=layout)
        mine = mine.clone().requires_grad_()
        model = nn.Sequential(new_norm())
        policy = GroupNorm(workers=len(shares))
        policy.apply(model, exchange.rank, len(shares), lambda ranks: exchange.all_reduce)
        output = model(mine)
        (output * slopes.split(shares)[exchange.rank]).sum().backward()
        return output, mine.grad, model[0]

    outputs, grads, layers = zip(*on_ranks(len(shares), member), strict=True)
    torch.testing.assert_close(torch.cat(outputs), expected)
    torch.testing.assert_close(torch.cat(grads), whole.grad)
    torch.testing.assert_close(sum(each.weight.grad for each in layers), joined.weight.grad)
    torch.testing.assert_close(sum(each.bias.grad for each in layers), joined.bias.grad)
    for layer in layers:
        for name, value in joined.state_dict().items():
            torch.testing.assert_close(layer.state_dict()[name], value)


def test_the_sheet_example_of_two_shards() -> None:
    shards = [torch.tensor([[1.0], [3.0]]), torch.tensor([[5.0], [7.0]])]

    def member(exchange):
        return group_batch_norm(shards[exchange.rank], None, None, 0.0, exchange.all_reduce)[1:]

    for mean, variance, count in on_ranks(2, member):
        assert (float(mean), float(variance), float(count)) == (4.0, 5.0, 4.0)


def test_a_large_mean_does_not_eat_the_variance() -> None:
    inputs = torch.randn(64, 1, generator=torch.Generator().manual_seed(0)) + 1e4
    _, _, variance, _ = group_batch_norm(inputs, None, None, 0.0, lambda tensor: tensor)
    torch.testing.assert_close(
        variance, inputs.double().var(0, correction=0).float(), rtol=1e-3, atol=0
    )


@given(st.integers(1, 40), st.integers(1, 12))
def test_groups_cover_all_ranks_and_are_nearly_equal(world: int, size: int) -> None:
    groups = {normalization_group(rank, world, size) for rank in range(world)}
    assert sorted(rank for group in groups for rank in group) == list(range(world))
    lengths = [len(group) for group in groups]
    assert max(lengths) <= size
    assert max(lengths) - min(lengths) <= 1


@given(st.integers(1, 500), st.integers(2, 64))
def test_ghosts_are_nearly_equal_and_never_single(samples: int, size: int) -> None:
    sizes = ghost_sizes(samples, size)
    assert sum(sizes) == samples
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) <= 1.5 * size
    assert min(sizes) >= 2 or samples == 1


def test_a_ghost_is_normalized_alone_whatever_the_batch() -> None:
    inputs, _ = batch(12)
    model = nn.Sequential(new_norm())
    GhostNorm(samples=4).apply(model, 0, 1, lambda ranks: lambda tensor: tensor)
    reference = new_norm()
    expected = torch.cat([reference(part) for part in inputs.split(4)])
    torch.testing.assert_close(model(inputs), expected)
    whole = new_norm()
    whole(inputs)
    torch.testing.assert_close(model[0].running_var, whole.running_var)
    torch.testing.assert_close(model[0].running_mean, whole.running_mean)
    model.eval()
    whole.eval()
    torch.testing.assert_close(model(inputs), whole(inputs))


def test_names_parameters_and_checkpoints_stay() -> None:
    model = ModelConfig(name="resnet8_cifar").build(10, 0)
    before = dict(model.named_parameters())
    state = copy.deepcopy(model.state_dict())
    replaced = GhostNorm(samples=8).apply(model, 0, 1, lambda ranks: lambda tensor: tensor)
    assert replaced == 9
    after = dict(model.named_parameters())
    assert list(before) == list(after)
    assert all(before[name] is after[name] for name in before)
    model.load_state_dict(state, strict=True)
    assert LocalNorm().apply(model, 0, 1, lambda ranks: lambda tensor: tensor) == 0


def test_a_group_of_one_is_local() -> None:
    model = nn.Sequential(new_norm())
    layer = model[0]
    assert GroupNorm(workers=4).apply(model, 0, 1, lambda ranks: lambda tensor: tensor) == 0
    assert model[0] is layer


def test_a_layer_with_two_names_stays_one() -> None:
    model = nn.Sequential(new_norm(), nn.ReLU())
    model.append(model[0])
    assert GhostNorm().apply(model, 0, 1, lambda ranks: lambda tensor: tensor) == 1
    assert model[0] is model[2]


def test_the_last_batch_of_all_workers_is_what_evaluation_sees() -> None:
    inputs, _ = batch(8)

    def member(exchange):
        model = nn.Sequential(new_norm())
        LocalNorm(evaluation="last_batch").apply(
            model, exchange.rank, 2, lambda ranks: exchange.all_reduce
        )
        model(torch.full_like(inputs[:4], 100.0))
        model(inputs[4 * exchange.rank :][:4])
        average_normalization(model, exchange.all_reduce, weight=1.0)
        return model[0]

    for layer in on_ranks(2, member):
        torch.testing.assert_close(layer.running_mean, inputs.mean((0, 2, 3)))
        torch.testing.assert_close(
            layer.running_var, inputs.var((0, 2, 3), correction=0), rtol=0.05, atol=0
        )


def test_recomputed_statistics_are_those_of_all_samples() -> None:
    inputs, _ = batch(11)

    def member(exchange):
        model = nn.Sequential(new_norm(), nn.Dropout(0.9), new_norm())
        model[0].momentum = 0.3
        model[1].eval()
        parts = [[inputs[:3], inputs[3:7]], [inputs[7:]], []][exchange.rank]
        recompute_statistics(model, parts, exchange.all_reduce)
        assert model[0].training
        assert not model[1].training
        assert model[0].momentum == 0.3
        return model

    for model in on_ranks(3, member):
        torch.testing.assert_close(model[0].running_mean, inputs.mean((0, 2, 3)))
        torch.testing.assert_close(model[0].running_var, inputs.var((0, 2, 3)))
        assert model[2].running_mean[0] != 0


def test_a_setting_that_would_do_nothing_is_refused() -> None:
    with pytest.raises(ValidationError, match="recomputed"):
        LocalNorm(recompute_samples=64)
