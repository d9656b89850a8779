"""Factors kept as rows, and kernel positions that never meet the image: exact, only cheaper."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from natural_nets import assert_close, losses_of, on_ranks, samples, seeded, train_step, weights
from test_natural_kronecker import KFAC, SP, dense_direction, go_on
from torch import Tensor, nn

from adaptive_platform.optimizers import Exchange
from adaptive_platform.optimizers.natural.collected import Collected
from adaptive_platform.optimizers.natural.factor_forms import (
    as_matrix,
    is_rows,
    mean_diagonal,
    similar,
    widened,
)
from adaptive_platform.optimizers.natural.factors import (
    input_products,
    input_rows,
    taps_in_use,
)
from adaptive_platform.optimizers.natural.inverses import (
    kronecker_solve,
    robust_inverse,
    row_inverse,
)

F64 = torch.float64


class WideNet(nn.Module):
    """Wide layers on few positions: with 12 samples A or G of both linear layers are rows."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 8, 3, stride=3, dtype=F64)
        self.small = nn.Conv2d(8, 16, 3, padding=1, dtype=F64)
        self.wide = nn.Linear(16, 40, dtype=F64)
        self.head = nn.Linear(40, 3, dtype=F64)

    def forward(self, images: Tensor) -> Tensor:
        features = self.conv(images).tanh()
        features = nn.functional.avg_pool2d(features, 2)
        features = self.small(features).tanh().mean((2, 3))
        return self.head(self.wide(features).tanh())


def wide_net() -> nn.Module:
    return seeded(WideNet)


def run(config, steps: int, exchange: Exchange, shares: list[list[int]]):
    model = wide_net()
    optimizer = config.build_for(model, exchange)
    go_on(model, optimizer, range(steps), exchange, shares)
    return model, optimizer


def block_of(optimizer, name: str):
    return next(b for b in optimizer.curvature.blocks if b.name == name)


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(8, 12), st.floats(1e-4, 10.0), st.integers(0, 99))
def test_a_row_inverse_is_the_inverse_of_the_damped_product(rows, side, damping, seed) -> None:
    torch.manual_seed(seed)
    r = torch.randn(rows, side, dtype=F64)
    gradient = torch.randn(3, side, dtype=F64)
    found = robust_inverse(r, damping, row_inverse)
    assert found is not None
    expected = torch.linalg.solve(r.T @ r + damping * torch.eye(side, dtype=F64), gradient.T).T
    one = (torch.eye(3, dtype=F64),)
    torch.testing.assert_close(kronecker_solve(gradient, found, one, 0.0), expected)
    turned = kronecker_solve(gradient.T.contiguous(), one, found, 0.0)
    torch.testing.assert_close(turned, expected.T)


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("right", [True, False])
@settings(deadline=None)
@given(st.floats(0.0, 0.3), st.integers(0, 99))
def test_similarity_does_not_depend_on_the_form(left, right, change, seed) -> None:
    torch.manual_seed(seed)
    x = torch.randn(3, 8, dtype=F64)
    y = x + change * torch.randn(3, 8, dtype=F64)
    expected = (as_matrix(y) - as_matrix(x)).norm() / as_matrix(x).norm()
    y, x = y if left else as_matrix(y), x if right else as_matrix(x)
    assert is_rows(y) is left
    for tolerance in (0.05, 0.1, 0.2):
        if abs(float(expected) - tolerance) > 1e-6:
            assert similar(y, x, tolerance) == (float(expected) < tolerance)
    assert not similar(y, torch.zeros_like(x), 0.1)


def test_the_mean_diagonal_and_a_wider_factor_do_not_depend_on_the_form() -> None:
    torch.manual_seed(0)
    rows = torch.randn(3, 8, dtype=F64)
    matrix = as_matrix(rows)
    assert mean_diagonal(rows) == pytest.approx(mean_diagonal(matrix))
    places = torch.tensor([0, 2, 3, 5, 6, 7, 9, 10])
    wide = widened(rows, places, 11)
    torch.testing.assert_close(as_matrix(wide), widened(matrix, places, 11))
    assert wide.shape == (3, 11)
    assert float(as_matrix(wide)[1].norm()) == 0.0


def test_rows_become_a_product_when_there_are_more() -> None:
    torch.manual_seed(0)
    rows = torch.randn(5, 4, dtype=F64)
    held = Collected()
    held.add_rows(rows[:2])
    assert held.num_rows == 2
    held.add_product(rows[2:].T @ rows[2:])
    assert held.rows is None
    torch.testing.assert_close(held.product, rows.T @ rows)


@pytest.mark.parametrize(
    ("size", "expected"),
    [((1, 1), (4,)), ((1, 3), (3, 4, 5)), ((2, 1), (1, 4, 7)), ((4, 4), tuple(range(9)))],
)
def test_kernel_positions_in_use(size, expected) -> None:
    assert taps_in_use(nn.Conv2d(1, 1, 3, padding=1), torch.zeros(2, 1, *size)) == expected


@settings(deadline=None)
@given(
    st.integers(1, 5), st.integers(1, 5), st.integers(1, 3), st.integers(0, 2), st.integers(1, 2)
)
def test_positions_out_of_use_are_the_zero_columns(height, width, stride, padding, dilation):
    if min(height, width) + 2 * padding < 2 * dilation + 1:
        return
    conv = nn.Conv2d(2, 3, 3, stride, padding, dilation, dtype=F64)
    inputs = torch.rand(4, 2, height, width, dtype=F64) + 0.5
    taps = taps_in_use(conv, inputs)
    every = input_rows(conv, inputs, F64)
    used = [c * 9 + t for c in range(2) for t in taps]
    others = sorted(set(range(18)) - set(used))
    assert float(every[:, others].abs().sum()) == 0.0
    assert bool((every[:, used] != 0).any(0).all())
    assert torch.equal(input_rows(conv, inputs, F64, taps), every[:, used])
    torch.testing.assert_close(
        input_products(conv, inputs, F64, bias=False, taps=taps),
        every[:, used].T @ every[:, used],
    )


@pytest.mark.parametrize("name", ["conv", "wide", "head"])
def test_a_step_with_rows_is_a_dense_kronecker_solve(name: str) -> None:
    model = wide_net()
    images, targets = samples(0)
    layer = model.get_submodule(name)
    expected = dense_direction(model, layer, images, targets, 1e-2)
    before = weights(model)
    optimizer = SP.build_for(model)
    train_step(model, optimizer, [(images, targets)], 12)
    moved = (before[f"{name}.weight"] - layer.weight.detach()) / 0.1
    torch.testing.assert_close(moved.flatten(1), expected[:, : moved[0].numel()])
    block = block_of(optimizer, name)
    assert bool(block.inputs.rows or block.outputs.rows) is (name != "conv")


def test_a_kernel_on_single_pixels_is_the_kernel_of_one() -> None:
    """A, its trace and its dimension are those of the 1x1 convolution that it is."""
    model, one = wide_net(), wide_net()
    one.small = nn.Conv2d(8, 16, 1, dtype=F64)
    with torch.no_grad():
        one.small.weight.copy_(model.small.weight[:, :, 1:2, 1:2])
        one.small.bias.copy_(model.small.bias)
    corners = model.small.weight.detach()[:, :, 0, 0].clone()
    for each in (model, one):
        go_on(each, SP.build_for(each), range(3), Exchange(), [[12]])
    torch.testing.assert_close(model.small.weight[:, :, 1:2, 1:2], one.small.weight)
    assert torch.equal(model.small.weight[:, :, 0, 0], corners)


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_workers_with_uneven_shares_equal_one(fraction: float) -> None:
    config = SP.model_copy(update={"gradient_worker_fraction": fraction})
    alone, _ = run(config, 5, Exchange(), [[12]])
    shares = [[5], [3, 2], [], [2]]
    for model in on_ranks(4, lambda exchange: run(config, 5, exchange, shares)[0]):
        assert_close(weights(alone), weights(model))


def test_rows_do_not_enter_a_running_average() -> None:
    _, optimizer = run(KFAC, 3, Exchange(), [[12]])
    assert not any(p.rows for b in optimizer.curvature.blocks for p in b.parts.values())
    _, optimizer = run(KFAC.model_copy(update={"factor_decay": 0.0}), 3, Exchange(), [[12]])
    assert block_of(optimizer, "head").inputs.rows == 12


def test_a_resume_with_other_workers_takes_the_same_next_steps() -> None:
    expected, _ = run(SP, 8, Exchange(), [[12]])

    def save(exchange: Exchange):
        model, optimizer = run(SP, 4, exchange, [[7], [5]])
        return weights(model), optimizer.state_dict()

    kept, saved = on_ranks(2, save)[0]

    def resume(exchange: Exchange):
        model = wide_net()
        model.load_state_dict(kept)
        optimizer = SP.build_for(model, exchange)
        optimizer.load_state_dict(copy.deepcopy(saved))
        go_on(model, optimizer, range(4, 8), exchange, [[4], [4], [4]])
        return weights(model)

    for found in on_ranks(3, resume):
        assert_close(weights(expected), found)


def test_rows_of_a_checkpoint_become_matrices_for_another_method() -> None:
    model, optimizer = run(SP, 3, Exchange(), [[12]])
    saved = copy.deepcopy(optimizer.state_dict())
    other = wide_net()
    other.load_state_dict(model.state_dict())
    config = SP.model_copy(update={"inverse": "newton_schulz"})
    resumed = config.build_for(other)
    resumed.load_state_dict(saved)
    for each, o in ((model, optimizer), (other, resumed)):
        go_on(each, o, range(3, 6), Exchange(), [[12]])
    assert not block_of(resumed, "head").inputs.rows
    assert not block_of(resumed, "head").failures
    assert_close(weights(model), weights(other))


def test_a_batch_that_outgrows_its_rows_is_kept_as_a_matrix() -> None:
    """And one that shrinks as rows again; both are compared with the older ones."""
    model = wide_net()
    optimizer = SP.build_for(model)
    forms = []
    for step, count in enumerate((12, 12, 48, 48, 12, 12)):
        train_step(model, optimizer, [samples(step, count)], count)
        forms.append(block_of(optimizer, "head").inputs.rows)
    assert forms[:3] == [12, 12, 0]
    assert forms[-1] in (0, 12)  # kept while stale
    assert all(value.isfinite().all() for value in weights(model).values())


def images_of(step: int, count: int, pixels: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(count, 2, pixels, pixels, generator=generator, dtype=F64)
    return images, torch.randint(3, (count,), generator=generator)


def test_images_that_grow_bring_the_other_kernel_positions_to_life() -> None:
    """Micro-batches and workers may see different sizes; the order changes nothing."""

    def go(exchange: Exchange, shares: list[list[int]]):
        model = wide_net()
        optimizer = SP.build_for(model, exchange)
        for step in range(4):
            sizes = [6, 6, 6] if step < 2 else [6, 12, 6]
            parts = [images_of(10 * step + k, 4, s) for k, s in enumerate(sizes)]
            train_step(model, optimizer, [parts[k] for k in shares[exchange.rank]], 12, exchange)
        return weights(model), block_of(optimizer, "small").taps

    alone, taps = go(Exchange(), [[0, 1, 2]])
    assert taps == tuple(range(9))
    other, _ = go(Exchange(), [[1, 2, 0]])
    assert_close(alone, other)
    for found, taps in on_ranks(2, lambda exchange: go(exchange, [[0, 2], [1]])):
        assert taps == tuple(range(9))
        assert_close(alone, found)
    start = weights(wide_net())["small.weight"]
    assert bool((alone["small.weight"] != start).flatten(2).any(2).all())


def test_positions_that_a_stale_factor_does_not_know_move_by_the_gradient() -> None:
    model = wide_net()
    config = KFAC.model_copy(update={"factor_interval": 99, "inverse_interval": 99,
                                     "momentum": 0.0, "kl_clip": None})  # fmt: skip
    optimizer = config.build_for(model)
    train_step(model, optimizer, [images_of(0, 12, 6)], 12)
    before = weights(model)["small.weight"]
    images, targets = images_of(1, 12, 12)
    train_step(model, optimizer, [(images, targets)], 12)
    gradient = model.small.weight.grad
    moved = before - model.small.weight.detach()
    torch.testing.assert_close(moved[:, :, 0, 0], 0.1 * gradient[:, :, 0, 0])
    assert not torch.allclose(moved[:, :, 1, 1], 0.1 * gradient[:, :, 1, 1])


def test_a_step_that_is_dropped_leaves_no_rows() -> None:
    model = wide_net()
    optimizer = SP.build_for(model)
    optimizer.begin(12)
    losses_of(model, *samples(3)).sum().backward()
    optimizer.discard()
    expected = wide_net()
    go_on(model, optimizer, range(2), Exchange(), [[12]])
    go_on(expected, SP.build_for(expected), range(2), Exchange(), [[12]])
    for name, value in weights(expected).items():
        assert torch.equal(value, weights(model)[name])


@pytest.mark.parametrize("inverse", ["cholesky", "eigen", "newton_schulz"])
def test_a_checkpoint_does_not_depend_on_the_memory_layout(inverse: str) -> None:
    """Channels-last weights have their columns in another order, in memory only."""
    config = SP.model_copy(update={"inverse": inverse})
    expected, _ = run(config, 6, Exchange(), [[12]])
    first, second = torch.channels_last, torch.contiguous_format
    for before, after in ((first, second), (second, first)):
        model = wide_net().to(memory_format=before)
        optimizer = config.build_for(model)
        go_on(model, optimizer, range(3), Exchange(), [[12]])
        saved = copy.deepcopy(optimizer.state_dict())
        other = wide_net()
        other.load_state_dict(model.state_dict())
        other = other.to(memory_format=after)
        resumed = config.build_for(other)
        resumed.load_state_dict(saved)
        go_on(other, resumed, range(3, 6), Exchange(), [[12]])
        assert_close(weights(expected), weights(other))


def test_images_that_grow_are_the_same_in_channels_last() -> None:
    found = []
    for layout in (torch.contiguous_format, torch.channels_last):
        model = wide_net().to(memory_format=layout)
        optimizer = SP.build_for(model)
        for step, size in enumerate((6, 6, 12, 12)):
            train_step(model, optimizer, [images_of(step, 12, size)], 12)
        found.append(weights(model))
    assert_close(*found)
