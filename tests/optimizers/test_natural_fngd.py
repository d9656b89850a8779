"""FNGD: the exact damped empirical Fisher of each layer, without building it."""

from __future__ import annotations

import copy

import pytest
import torch
from natural_nets import (
    assert_close,
    losses_of,
    on_ranks,
    samples,
    small_net,
    train_step,
    weights,
)

from adaptive_platform.optimizers import Exchange
from adaptive_platform.optimizers.natural.fngd import FngdConfig, SampleGradients, coefficients

F64 = torch.float64
CONFIG = FngdConfig(lr=0.1, momentum=0.5, damping=0.1)


def test_the_worked_example() -> None:
    u = torch.tensor([[1.0, 0.0, 1.0], [0.0, 2.0, 1.0]], dtype=F64)
    c = coefficients(u.T @ u, 0.1, 3)
    torch.testing.assert_close(
        c, torch.tensor([1.069407, 0.414060, -0.390229], dtype=F64), rtol=0, atol=1e-6
    )
    torch.testing.assert_close(
        u @ c, torch.tensor([0.679178, 0.437891], dtype=F64), rtol=0, atol=1e-6
    )
    torch.testing.assert_close(
        1e9 * coefficients(u.T @ u, 1e9, 3), torch.full((3,), 1 / 3).double()
    )


def test_a_repeated_sample_has_equal_coefficients() -> None:
    u = torch.tensor([[1.0, 1.0, 0.3], [2.0, 2.0, -1.0]], dtype=F64)
    c = coefficients(u.T @ u, 0.1, 3)
    torch.testing.assert_close(c[0], c[1])


@pytest.mark.parametrize("positions", [1, 5])
def test_inner_products_and_sums_are_those_of_whole_gradients(positions: int) -> None:
    a = torch.randn(6, positions, 3, dtype=F64)
    g = torch.randn(6, positions, 2, dtype=F64)
    whole = torch.einsum("mto,mti->moi", g, a).flatten(1)
    found = SampleGradients.of(a, g)
    torch.testing.assert_close(found.gram(), whole @ whole.T)
    c = torch.randn(6, dtype=F64)
    torch.testing.assert_close(found.weighted_sum(c, (2, 3)).flatten(), c @ whole)


def test_a_step_solves_the_dense_damped_fisher_of_each_layer() -> None:
    model = small_net()
    images, targets = samples(0)
    per_sample = [
        torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        for loss in losses_of(model, images, targets)
    ]
    names = [name for name, _ in model.named_parameters()]
    before = weights(model)
    train_step(
        model, CONFIG.build_for(model), [(images[:5], targets[:5]), (images[5:], targets[5:])], 12
    )
    for layer in ("conv1", "conv2", "twice", "head"):
        own = [i for i, name in enumerate(names) if name.startswith(layer + ".")]
        u = torch.stack([torch.cat([grads[i].flatten() for i in own]) for grads in per_sample]).T
        fisher = u @ u.T / 12 + 0.1 * torch.eye(len(u), dtype=F64)
        expected = torch.linalg.solve(fisher, u.mean(1))
        after = weights(model)
        moved = torch.cat([(before[names[i]] - after[names[i]]).flatten() for i in own]) / 0.1
        torch.testing.assert_close(moved, expected)


def run(exchange: Exchange, shares: list[list[int]], steps: int, config: FngdConfig = CONFIG):
    model = small_net()
    optimizer = config.build_for(model, exchange)
    go_on(model, optimizer, range(steps), exchange, shares)
    return model, optimizer


def go_on(model, optimizer, steps, exchange, shares) -> None:
    sizes = [size for share in shares for size in share]
    before = sum(len(share) for share in shares[: exchange.rank])
    for step in steps:
        images, targets = samples(step)
        parts = list(zip(images.split(sizes), targets.split(sizes), strict=True))
        optimizer.set_progress(step / 4)
        mine = parts[before : before + len(shares[exchange.rank])]
        train_step(model, optimizer, mine, 12, exchange)


def test_workers_with_uneven_shares_equal_one() -> None:
    alone, _ = run(Exchange(), [[12]], 6)
    for model, _ in on_ranks(3, lambda exchange: run(exchange, [[4, 3], [], [5]], 6)):
        assert_close(weights(alone), weights(model))


def test_after_the_first_epoch_layers_are_rescaled_by_their_mean_coefficient() -> None:
    model, optimizer = run(Exchange(), [[12]], 4, CONFIG.model_copy(update={"momentum": 0.0}))
    total, count = optimizer.natural_state()["factors"]["head"]
    assert count == 4
    before = weights(model)["head.weight"]
    go_on(model, optimizer, range(4, 5), Exchange(), [[12]])
    assert optimizer.natural_state()["factors"]["head"] == [total, count]
    torch.testing.assert_close(
        before - weights(model)["head.weight"], 0.1 * total / count * model.head.weight.grad
    )


@pytest.mark.parametrize("at", [2, 5])
def test_saved_and_loaded_state_gives_the_same_bits(at: int) -> None:
    model, optimizer = run(Exchange(), [[12]], at)
    saved = copy.deepcopy(optimizer.state_dict())
    resumed = small_net()
    resumed.load_state_dict(model.state_dict())
    fresh = CONFIG.build_for(resumed)
    fresh.load_state_dict(saved)
    go_on(model, optimizer, range(at, 8), Exchange(), [[12]])
    go_on(resumed, fresh, range(at, 8), Exchange(), [[12]])
    for name, value in weights(model).items():
        assert torch.equal(value, weights(resumed)[name]), name


def test_a_dropped_step_leaves_no_trace() -> None:
    expected, _ = run(Exchange(), [[12]], 2)
    model, optimizer = run(Exchange(), [[12]], 1)
    optimizer.begin(12)
    images, targets = samples(9)
    images[0] = torch.nan
    losses_of(model, images, targets).sum().backward()
    optimizer.discard()
    go_on(model, optimizer, range(1, 2), Exchange(), [[12]])
    for name, value in weights(expected).items():
        assert torch.equal(value, weights(model)[name])
