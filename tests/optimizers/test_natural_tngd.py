"""TNGD: the simulated relaxation against its closed form and against exact solves."""

from __future__ import annotations

import copy

import pytest
import torch
from natural_nets import assert_close, on_ranks, samples, seeded, train_step, weights
from torch import nn

from adaptive_platform.errors import UserError
from adaptive_platform.optimizers import Exchange
from adaptive_platform.optimizers.natural import tngd
from adaptive_platform.optimizers.natural.tngd import (
    TngdConfig,
    conjugate_gradient,
    relax,
    woodbury_solve,
)

F64 = torch.float64
A = torch.diag(torch.tensor([2.0, 0.5], dtype=F64))
B = torch.ones(2, dtype=F64)


@pytest.mark.parametrize(
    ("duration", "expected"),
    [(0, (1.0, 1.0)), (1, (0.553687, 1.401263)), (5, (0.500007, 1.923055)), (20, (0.5, 1.999965))],
)
def test_the_worked_example(duration: float, expected: tuple[float, float]) -> None:
    found = relax(lambda x: A @ x, B, B, duration=duration, time_step=0.1, temperature=0.0)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=F64), rtol=0, atol=1e-6)


@pytest.mark.parametrize("stiff", [25.0, 100.0])
def test_a_time_step_that_is_too_long_is_shortened(stiff: float) -> None:
    diagonal = torch.tensor([stiff, 0.5], dtype=F64)
    products = []

    def product(x: torch.Tensor) -> torch.Tensor:
        products.append(x)
        return diagonal * x

    found = relax(product, B, B, duration=2, time_step=0.1, temperature=0.0)
    soft = 2.0 - (2.0 - 1.0) * torch.exp(torch.tensor(-0.5 * 2))
    torch.testing.assert_close(found, torch.stack([torch.tensor(1 / stiff), soft]).to(F64),
                               rtol=0.02, atol=1e-3)  # fmt: skip
    assert len(products) <= 8 * 20 + 1


def test_what_is_too_stiff_for_the_budget_relaxes_for_less_time() -> None:
    diagonal = torch.tensor([1e6, 0.5], dtype=F64)
    found = relax(lambda x: diagonal * x, B, B, duration=0.4, time_step=0.1, temperature=0.0)
    assert bool(found.isfinite().all())
    assert (diagonal * found - B).norm() < (diagonal * B - B).norm()


def test_noise_has_the_stationary_variance_of_the_discrete_process() -> None:
    diagonal = torch.tensor([2.0, 0.5], dtype=F64).repeat_interleave(4000)
    found = relax(
        lambda x: diagonal * x,
        torch.zeros(8000, dtype=F64),
        torch.zeros(8000, dtype=F64),
        duration=20.0,
        time_step=0.05,
        temperature=0.01,
        generator=torch.Generator().manual_seed(0),
    )
    variances = found.view(2, 4000).var(1)
    torch.testing.assert_close(
        variances, torch.tensor([0.005263, 0.020253], dtype=F64), rtol=0.08, atol=0
    )


def new_model() -> nn.Module:
    return seeded(
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(48, 3)).to(F64)
    )


def exact_direction(model: nn.Module, images, targets, damping: float) -> torch.Tensor:
    """From whole Jacobians, by Woodbury."""
    params = list(model.parameters())
    scores = model(images)
    loss = nn.functional.cross_entropy(scores, targets)
    gradient = torch.cat(
        [g.flatten() for g in torch.autograd.grad(loss, params, retain_graph=True)]
    )
    rows = [
        torch.cat([g.flatten() for g in torch.autograd.grad(value, params, retain_graph=True)])
        for value in scores.flatten()
    ]
    jacobian = torch.stack(rows).view(*scores.shape, -1)
    p = scores.softmax(-1).detach()
    hessian = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    solved = woodbury_solve(jacobian, hessian, gradient, damping)
    matrix = torch.einsum("bdp,bde,beq->pq", jacobian, hessian, jacobian) / len(images)
    dense = torch.linalg.solve(matrix + damping * torch.eye(len(gradient), dtype=F64), gradient)
    torch.testing.assert_close(solved, dense)
    return solved


@pytest.mark.parametrize(
    "config",
    [
        TngdConfig(lr=0.1, damping=0.5, duration=40.0, time_step=0.4),
        TngdConfig(lr=0.1, damping=0.05, solver="conjugate_gradient", iterations=300),
    ],
    ids=lambda c: c.solver,
)
def test_a_long_run_is_the_natural_gradient(config: TngdConfig) -> None:
    model = new_model()
    images, targets = samples(0)
    expected = exact_direction(model, images, targets, config.damping)
    before = weights(model)
    optimizer = config.build_for(model)
    train_step(model, optimizer, [(images[:5], targets[:5]), (images[5:], targets[5:])], 12)
    moved = torch.cat([(before[n] - w).flatten() for n, w in weights(model).items()]) / 0.1
    torch.testing.assert_close(moved, expected, rtol=1e-4, atol=1e-6)


def test_no_time_is_the_gradient() -> None:
    model = new_model()
    optimizer = TngdConfig(lr=0.1, duration=0.0).build_for(model)
    before = weights(model)
    train_step(model, optimizer, [samples(0)], 12)
    for name, param in model.named_parameters():
        torch.testing.assert_close(before[name] - param.detach(), 0.1 * param.grad)


CONFIG = TngdConfig(
    lr=0.1, damping=0.5, duration=2.0, time_step=0.2, temperature=1e-3, momentum=0.5
)


def run(exchange: Exchange, shares: list[list[int]], steps: range, model=None, optimizer=None):
    model = model or new_model()
    optimizer = optimizer or CONFIG.build_for(model, exchange)
    sizes = [size for share in shares for size in share]
    before = sum(len(share) for share in shares[: exchange.rank])
    for step in steps:
        images, targets = samples(step)
        parts = list(zip(images.split(sizes), targets.split(sizes), strict=True))
        mine = parts[before : before + len(shares[exchange.rank])]
        train_step(model, optimizer, mine, 12, exchange)
    return model, optimizer


def test_workers_with_uneven_shares_equal_one() -> None:
    alone, _ = run(Exchange(), [[12]], range(3))
    for model, _ in on_ranks(3, lambda exchange: run(exchange, [[4, 3], [], [5]], range(3))):
        assert_close(weights(alone), weights(model))


def test_saved_and_loaded_state_gives_the_same_bits() -> None:
    model, optimizer = run(Exchange(), [[12]], range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    resumed = new_model()
    resumed.load_state_dict(model.state_dict())
    fresh = CONFIG.build_for(resumed)
    fresh.load_state_dict(saved)
    run(Exchange(), [[12]], range(2, 4), model, optimizer)
    run(Exchange(), [[12]], range(2, 4), resumed, fresh)
    for name, value in weights(model).items():
        assert torch.equal(value, weights(resumed)[name]), name


def test_running_averages_of_batch_norm_move_once_per_forward_pass() -> None:
    norm = nn.BatchNorm1d(72)
    model = nn.Sequential(nn.Flatten(), norm, nn.Linear(72, 3)).to(F64)
    train_step(model, CONFIG.build_for(model), [samples(0)], 12)
    assert int(norm.num_batches_tracked) == 1
    assert norm.running_mean is not None


def test_a_curvature_that_overflows_falls_back_and_says_so_once(monkeypatch) -> None:
    told: list[str] = []
    model = new_model()
    overflowing = lambda self, vector: torch.full_like(vector, torch.inf)  # noqa: E731
    monkeypatch.setattr(tngd._ScoreMap, "curvature", overflowing)
    optimizer = CONFIG.build_for(model, None, told.append)
    for step in range(2):
        train_step(model, optimizer, [samples(step)], 12)
    assert len(told) == 1
    assert "optimizer.damping" in told[0]
    assert all(value.isfinite().all() for value in weights(model).values())


def test_a_step_too_long_for_the_curvature_stays_finite_without_a_word() -> None:
    told: list[str] = []
    model = new_model()
    config = CONFIG.model_copy(update={"time_step": 50.0, "duration": 100.0, "damping": 10.0})
    optimizer = config.build_for(model, None, told.append)
    train_step(model, optimizer, [samples(0)], 12)
    assert not told
    assert all(value.isfinite().all() for value in weights(model).values())


def test_dropout_is_refused() -> None:
    with pytest.raises(UserError, match="dropout"):
        CONFIG.build_for(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)))


def test_conjugate_gradient_solves() -> None:
    matrix = torch.tensor([[4.0, 1.0], [1.0, 3.0]], dtype=F64)
    found = conjugate_gradient(lambda x: matrix @ x, B, torch.zeros(2, dtype=F64), iterations=5)
    torch.testing.assert_close(matrix @ found, B)
