"""The Kronecker-factored optimizer against dense matrices, and against itself in other layouts."""

from __future__ import annotations

import copy

import pytest
import torch
from natural_nets import (
    ThreadLinks,
    assert_close,
    losses_of,
    on_ranks,
    reduce_gradients,
    samples,
    seeded,
    small_net,
    train_step,
    weights,
)
from ranks import as_threads
from torch import nn

from adaptive_platform.errors import CheckpointError, RunFailedError, UserError
from adaptive_platform.optimizers import Exchange, set_lr
from adaptive_platform.optimizers.natural.kfac import KfacConfig
from adaptive_platform.optimizers.natural.kronecker import KroneckerConfig
from adaptive_platform.optimizers.natural.sp_ngd import SpNgdConfig

PLAIN = {
    "momentum": 0.0,
    "momentum_rule": "constant",
    "rescale_weights": False,
    "refresh_share": 1e9,
    "kl_clip": None,
}
SP = SpNgdConfig(lr=0.1, damping=1e-2, **PLAIN)
KFAC = KfacConfig(lr=0.1, damping=1e-2, factor_interval=2, inverse_interval=3, refresh_share=1e9)
CONFIGS = [
    SP,
    SP.model_copy(update={"inverse": "newton_schulz", "momentum": 0.9}),
    SP.model_copy(update={"refresh_share": 0.2, "momentum_rule": "correction", "momentum": 0.9}),
    KFAC,
    KFAC.model_copy(update={"inverse": "eigen"}),
]
every_config = pytest.mark.parametrize(
    "config", CONFIGS, ids=lambda c: f"{c.kind} {c.inverse} {c.refresh_share}"
)


def run(config: KroneckerConfig, steps: int, exchange: Exchange, shares: list[list[int]]):
    """Train; `shares[rank]` lists the micro-batch sizes of that rank."""
    model = small_net()
    optimizer = config.build_for(model, exchange)
    go_on(model, optimizer, range(steps), exchange, shares)
    return model, optimizer


def go_on(model, optimizer, steps, exchange, shares, dtype=torch.float64) -> None:
    sizes = [size for share in shares for size in share]
    total = sum(sizes)
    before = sum(len(share) for share in shares[: exchange.rank])
    for step in steps:
        set_lr(optimizer, 0.1 / (1 + step))
        images, targets = samples(step, total, dtype)
        parts = list(zip(images.split(sizes), targets.split(sizes), strict=True))
        mine = parts[before : before + len(shares[exchange.rank])]
        train_step(model, optimizer, mine, total, exchange)


def dense_direction(model, layer, images, targets, damping) -> torch.Tensor:
    """`(G (x) A)^-1 vec(dW)` from per-sample passes and one dense solve, pi-damped."""
    inputs, outputs, grads = [], [], []
    for image, target in zip(images, targets, strict=True):
        kept = {}
        handle = layer.register_forward_hook(lambda _m, a, o, k=kept: k.update(x=a[0], y=o))
        loss = losses_of(model, image[None], target[None]).sum()
        handle.remove()
        (g,) = torch.autograd.grad(loss, kept["y"], retain_graph=True)
        grads.append(torch.autograd.grad(loss, list(layer.parameters())))
        if isinstance(layer, nn.Conv2d):
            patches = nn.functional.unfold(
                kept["x"], layer.kernel_size, stride=layer.stride, padding=layer.padding
            )[0].T
            rows = g[0].flatten(1).T
        else:
            patches, rows = kept["x"], g
        if layer.bias is not None:
            patches = torch.cat([patches, torch.ones(len(patches), 1, dtype=patches.dtype)], 1)
        inputs.append(patches.detach())
        outputs.append(rows)
    a = sum(p.T @ p for p in inputs) / len(inputs)
    g = sum(r.T @ r for r in outputs) / sum(len(r) for r in outputs)
    pi = ((a.trace() / len(a)) / (g.trace() / len(g))).sqrt()
    a = a + pi * damping**0.5 * torch.eye(len(a))
    g = g + damping**0.5 / pi * torch.eye(len(g))
    mean = [sum(parts) / len(grads) for parts in zip(*grads, strict=True)]
    matrix = mean[0].flatten(1)
    if layer.bias is not None:
        matrix = torch.cat([matrix, mean[1][:, None]], 1)
    return torch.linalg.solve(torch.kron(g, a), matrix.flatten()).view_as(matrix)


@pytest.mark.parametrize("name", ["conv1", "conv2", "head"])
def test_a_step_is_a_dense_kronecker_solve(name: str) -> None:
    model = small_net()
    images, targets = samples(0)
    layer = model.get_submodule(name)
    expected = dense_direction(model, layer, images, targets, 1e-2)
    before = weights(model)
    train_step(model, SP.build_for(model), [(images, targets)], 12)
    moved = (before[f"{name}.weight"] - layer.weight.detach()) / 0.1
    torch.testing.assert_close(moved.flatten(1), expected[:, : moved[0].numel()])
    if layer.bias is not None:
        moved = (before[f"{name}.bias"] - layer.bias.detach()) / 0.1
        torch.testing.assert_close(moved, expected[:, -1])


def test_a_single_sample_and_position_is_the_exact_fisher() -> None:
    """A (x) G = vec(dW) vec(dW)^T, so the eigen form solves the true damped system."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2, bias=False, dtype=torch.float64))
    config = KfacConfig(lr=1.0, momentum=0.0, damping=0.1, inverse="eigen", kl_clip=None)
    optimizer = config.build_for(model)
    inputs, target = torch.randn(1, 3, dtype=torch.float64), torch.tensor([1])
    before = model[0].weight.detach().clone()
    train_step(model, optimizer, [(inputs, target)], 1)
    gradient = model[0].weight.grad.flatten()
    fisher = torch.outer(gradient, gradient) + 0.1 * torch.eye(6, dtype=torch.float64)
    expected = torch.linalg.solve(fisher, gradient).view(2, 3)
    torch.testing.assert_close(before - model[0].weight.detach(), expected)


def test_a_layer_used_twice_counts_both_uses_as_positions() -> None:
    model = small_net()
    optimizer = SP.build_for(model)
    images, targets = samples(0)
    seen = []
    model.twice.register_forward_hook(lambda _m, a, _o: seen.append(a[0].detach()))
    train_step(model, optimizer, [(images, targets)], 12)
    block = next(b for b in optimizer.curvature.blocks if b.name == "twice")
    rows = torch.cat([torch.cat([x, torch.ones(12, 1)], 1) for x in seen])
    torch.testing.assert_close(block.inputs.value, rows.T @ rows / 12)


def test_with_large_damping_the_step_is_the_gradient_over_it() -> None:
    model = small_net()
    optimizer = SP.model_copy(update={"damping": 1e8, "lr": 1e8}).build_for(model)
    before = weights(model)
    train_step(model, optimizer, [samples(0)], 12)
    for name, param in model.named_parameters():
        torch.testing.assert_close(before[name] - param.detach(), param.grad, rtol=1e-3, atol=1e-6)


@every_config
def test_micro_batches_and_loss_scale_change_nothing(config: KroneckerConfig) -> None:
    whole, _ = run(config, 5, Exchange(), [[12]])
    parts, _ = run(config, 5, Exchange(), [[5, 3, 4]])
    assert_close(weights(whole), weights(parts))
    model = small_net()
    optimizer = config.build_for(model)
    for step in range(5):
        set_lr(optimizer, 0.1 / (1 + step))
        train_step(model, optimizer, [samples(step)], 12, loss_scale=1024.0)
    assert_close(weights(whole), weights(model))


@every_config
@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_workers_with_uneven_shares_equal_one(config: KroneckerConfig, fraction: float) -> None:
    """MEM-OPT, the hybrid and COMM-OPT; one worker has no sample at all."""
    config = config.model_copy(update={"gradient_worker_fraction": fraction})
    alone, _ = run(config, 6, Exchange(), [[12]])
    shares = [[5], [3, 2], [], [2]]
    for model in on_ranks(4, lambda exchange: run(config, 6, exchange, shares)[0]):
        assert_close(weights(alone), weights(model))


def test_a_fraction_that_needs_groups_is_refused_where_there_are_none() -> None:
    config = SP.model_copy(update={"gradient_worker_fraction": 0.5})
    with pytest.raises(UserError, match=r"gradient_worker_fraction = 0\.5"):
        config.build_for(small_net(), Exchange(rank=1, world_size=4))
    config.build_for(small_net(), Exchange(rank=1, world_size=2))


def test_least_traffic_needs_no_message_between_refreshes() -> None:
    config = KFAC.model_copy(update={"factor_interval": 9, "inverse_interval": 9})
    sent = []
    for fraction in (0.0, 1.0):
        config = config.model_copy(update={"gradient_worker_fraction": fraction})
        links = ThreadLinks(2)

        def train(rank: int, config=config, links=links) -> int:
            exchange = links.of(rank)
            model = small_net()
            optimizer = config.build_for(model, exchange)
            go_on(model, optimizer, range(1), exchange, [[6], [6]])
            before = links.elements
            go_on(model, optimizer, range(1, 2), exchange, [[6], [6]])
            return links.elements - before

        sent.append(as_threads(2, train)[0])
    parameters = sum(p.numel() + 1 for p in small_net().parameters())
    gradients = sum(p.numel() for p in small_net().parameters())
    assert sent[1] == parameters  # the test's own reduction of gradients
    # Each sends the layers that it made, padded to the larger of the two shares.
    assert gradients / 2 <= sent[0] - sent[1] < 0.7 * gradients


def test_workers_hold_the_same_bits_and_only_their_own_factors() -> None:
    shares = [[6], [6]]
    (first, one), (second, two) = on_ranks(2, lambda exchange: run(SP, 4, exchange, shares))
    _, alone = run(SP, 4, Exchange(), [[12]])
    for name, value in weights(first).items():
        assert torch.equal(value, weights(second)[name])
    assert one.curvature.num_bytes + two.curvature.num_bytes == alone.curvature.num_bytes
    assert max(one.curvature.num_bytes, two.curvature.num_bytes) < 0.8 * alone.curvature.num_bytes


@every_config
def test_saved_and_loaded_state_gives_the_same_bits(config: KroneckerConfig) -> None:
    model, optimizer = run(config, 4, Exchange(), [[12]])
    saved = copy.deepcopy(optimizer.state_dict())
    resumed = copy.deepcopy(model)
    for module in resumed.modules():
        module._forward_hooks.clear()
    fresh = config.build_for(resumed)
    fresh.load_state_dict(saved)
    go_on(model, optimizer, range(4, 9), Exchange(), [[12]])
    go_on(resumed, fresh, range(4, 9), Exchange(), [[12]])
    for name, value in weights(model).items():
        assert torch.equal(value, weights(resumed)[name]), name


@every_config
def test_a_resume_with_other_workers_takes_the_same_next_steps(config: KroneckerConfig) -> None:
    expected, _ = run(config, 8, Exchange(), [[12]])
    shares = [[7], [5]]

    def save(exchange: Exchange):
        model, optimizer = run(config, 4, exchange, shares)
        return weights(model), optimizer.state_dict()

    kept, saved = on_ranks(2, save)[1]

    def resume(exchange: Exchange):
        model = small_net()
        model.load_state_dict(kept)
        optimizer = config.build_for(model, exchange)
        optimizer.load_state_dict(copy.deepcopy(saved))
        go_on(model, optimizer, range(4, 8), exchange, [[4], [4], [4]])
        return weights(model)

    for found in on_ranks(3, resume):
        assert_close(weights(expected), found)


def test_state_is_plain_tensors_and_numbers(tmp_path) -> None:
    _, optimizer = run(SP, 3, Exchange(), [[12]])
    torch.save(optimizer.natural_state(), tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True)["steps"] == 3


def test_state_of_other_layers_is_refused() -> None:
    _, optimizer = run(SP, 1, Exchange(), [[12]])
    other = SP.build_for(nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match="other layers"):
        other.load_natural_state(optimizer.natural_state())


def test_a_dropped_step_leaves_no_trace() -> None:
    expected, _ = run(SP, 2, Exchange(), [[12]])
    model = small_net()
    optimizer = SP.build_for(model)
    go_on(model, optimizer, range(1), Exchange(), [[12]])
    optimizer.begin(12)
    images, targets = samples(7)
    images[0] = torch.nan
    losses_of(model, images, targets).sum().backward()
    optimizer.discard()
    go_on(model, optimizer, range(1, 2), Exchange(), [[12]])
    for name, value in weights(expected).items():
        assert torch.equal(value, weights(model)[name])


def test_passes_while_paused_or_without_gradient_are_not_listened_to() -> None:
    expected, _ = run(SP, 1, Exchange(), [[12]])
    model = small_net()
    optimizer = SP.build_for(model)
    images, targets = samples(0)
    set_lr(optimizer, 0.1)
    optimizer.begin(12)
    with optimizer.paused():
        losses_of(model, *samples(3)).sum().backward()
    with torch.no_grad():
        model(images)
    model.zero_grad()
    (losses_of(model, images, targets).sum() / 12).backward()
    optimizer.step()
    for name, value in weights(expected).items():
        assert torch.equal(value, weights(model)[name])


def test_samples_that_were_left_out_are_not_counted() -> None:
    expected, _ = run(SP, 1, Exchange(), [[12]])
    model = small_net()
    optimizer = SP.build_for(model)
    set_lr(optimizer, 0.1)
    optimizer.begin(16)
    (losses_of(model, *samples(0)).sum() / 16).backward()
    reduce_gradients(model, Exchange(), 16 / 12)
    optimizer.accept(12)
    optimizer.step()
    assert_close(weights(expected), weights(model), 1e-9)


def test_a_step_without_begin_is_refused() -> None:
    with pytest.raises(UserError, match="without begin"):
        SP.build_for(small_net()).step()


def test_without_the_model_it_is_refused() -> None:
    with pytest.raises(UserError, match="build_for"):
        SP.build(small_net().named_parameters())


# --- field cases -------------------------------------------------------------------------------


def constant_images(model, optimizer) -> None:
    images, targets = torch.ones(12, 2, 6, 6), samples(0)[1]
    train_step(model, optimizer, [(images, targets)], 12)


@pytest.mark.parametrize("method", ["cholesky", "eigen", "newton_schulz"])
def test_singular_factors_with_tiny_damping_keep_all_finite(method: str) -> None:
    config = SP.model_copy(update={"damping": 1e-8, "inverse": method, "lr": 1e-4})
    model = small_net(dtype=torch.float32)
    optimizer = config.build_for(model)
    before = weights(model)
    for _ in range(5):
        constant_images(model, optimizer)
    for name, value in weights(model).items():
        assert value.isfinite().all()
        assert not torch.equal(value, before[name])


class Failing:
    """`cholesky_ex` that raises, or says nothing and returns NaN, as often as it is told."""

    def __init__(self, times: int, *, silently: bool) -> None:
        self.left, self.silently = times, silently
        self.real = torch.linalg.cholesky_ex

    def __call__(self, matrix):
        if self.left > 0:
            self.left -= 1
            if not self.silently:
                raise torch.linalg.LinAlgError("no luck")
            return torch.full_like(matrix, torch.nan), torch.zeros((), dtype=torch.int32)
        return self.real(matrix)


@pytest.mark.parametrize("silently", [True, False])
def test_a_decomposition_that_fails_once_is_retried(monkeypatch, silently: bool) -> None:
    told: list[str] = []
    model = small_net()
    optimizer = SP.build_for(model, None, told.append)
    monkeypatch.setattr(torch.linalg, "cholesky_ex", Failing(1, silently=silently))
    train_step(model, optimizer, [samples(0)], 12)
    assert not told
    assert all(block.ready for block in optimizer.curvature.blocks)


def test_where_all_tries_fail_the_gradient_is_plain_and_the_layer_is_named_once(
    monkeypatch,
) -> None:
    told: list[str] = []
    model = small_net()
    optimizer = SP.build_for(model, None, told.append)
    before = weights(model)
    monkeypatch.setattr(torch.linalg, "cholesky_ex", Failing(4, silently=True))
    train_step(model, optimizer, [samples(0)], 12)
    assert len(told) == 1
    assert "`conv1`" in told[0]
    assert "plain gradient" in told[0]
    torch.testing.assert_close(
        before["conv1.weight"] - model.conv1.weight.detach(), 0.1 * model.conv1.weight.grad
    )
    train_step(model, optimizer, [samples(1)], 12)
    assert next(b for b in optimizer.curvature.blocks if b.name == "conv1").ready


def test_the_last_good_inverse_is_used_and_patience_ends(monkeypatch) -> None:
    told: list[str] = []
    config = SP.model_copy(update={"tolerated_failures": 2})

    def train(exchange: Exchange) -> str:
        model = small_net()
        optimizer = config.build_for(model, exchange, told.append)
        shares = [[6], [6]]
        go_on(model, optimizer, range(1), exchange, shares)
        inverse = {b.name: dict(b.inverse) for b in optimizer.curvature.blocks}
        exchange.all_reduce(torch.zeros(1))
        monkeypatch.setattr(torch.linalg, "cholesky_ex", Failing(10**6, silently=False))
        exchange.all_reduce(torch.zeros(1))
        with pytest.raises(RunFailedError) as error:
            go_on(model, optimizer, range(1, 9), exchange, shares)
        for block in optimizer.curvature.blocks:
            for key, value in inverse[block.name].items():
                assert block.inverse[key] is value
        assert all(value.isfinite().all() for value in weights(model).values())
        return str(error.value)

    first, second = on_ranks(2, train)
    assert first == second
    assert "`conv1`" in first
    assert sorted(told) == sorted(set(told))
    assert any("last good inverse" in text for text in told)


def test_a_non_finite_batch_never_enters_the_factors() -> None:
    """Even where the loop does not drop the step."""
    model, optimizer = run(SP, 2, Exchange(), [[12]])
    before = [b.inputs.value.clone() for b in optimizer.curvature.blocks]
    optimizer.begin(12)
    images, targets = samples(7)
    images[0] = torch.nan
    (losses_of(model, images, targets).sum() / 12).backward()
    with torch.no_grad(), pytest.warns(UserWarning, match="last good inverse"):
        optimizer.curvature.update(2, 12, 1e-2, 1.0)
    for value, block in zip(before, optimizer.curvature.blocks, strict=True):
        assert torch.equal(value, block.inputs.value)
        assert block.failures == 1


class Mixed(nn.Module):
    """F12: depthwise, batch norm, embedding, a layer never called, one called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, 4)
        self.conv = nn.Conv2d(2, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.depthwise = nn.Conv2d(4, 4, 3, groups=4)
        self.twice = nn.Linear(4, 4)
        self.never = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        ids = (images.mean((1, 2, 3)) > 0).long()
        features = self.depthwise(self.norm(self.conv(images)).relu()).mean((2, 3))
        return self.head(self.twice(self.twice(features + self.embedding(ids)).tanh()))


@pytest.mark.parametrize("config", [SP, KFAC], ids=lambda c: c.kind)
def test_layers_that_are_not_covered_train_plainly_and_are_listed(config) -> None:
    def train(exchange: Exchange):
        model = seeded(Mixed)
        optimizer = config.build_for(model, exchange)
        before = weights(model)
        go_on(model, optimizer, range(5), exchange, [[7], [5]], torch.float32)
        for name, value in weights(model).items():
            assert value.isfinite().all()
            assert torch.equal(value, before[name]) == name.startswith("never"), name
        return weights(model), optimizer.describe()

    (one, text), (two, _) = on_ranks(2, train)
    for name, value in one.items():
        assert torch.equal(value, two[name])
    covered, *plain = text.split("\n")
    assert all(name in covered for name in ("conv", "norm", "twice", "head"))
    assert "embedding" not in covered
    assert any("grouped convolution" in line and "depthwise.weight" in line for line in plain)
    assert any("Embedding" in line and "embedding.weight" in line for line in plain)


class Tied(nn.Module):
    """F16: the embedding's weight is also the output layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, 4)
        self.middle = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(self.embedding((images[:, 0, 0, 0] > 0).long())).tanh())


def test_a_weight_shared_with_an_embedding_is_plain_counts_once_and_stays_shared() -> None:
    def train(exchange: Exchange):
        model = seeded(Tied)
        optimizer = SP.build_for(model, exchange)
        shares = [[12]] if exchange.world_size == 1 else [[7], [5]]
        go_on(model, optimizer, range(5), exchange, shares, torch.float32)
        assert model.head.weight is model.embedding.weight
        assert [name for name, _ in optimizer.coverage.plain] == ["embedding.weight"]
        return weights(model)

    alone = train(Exchange())
    for found in on_ranks(2, train):
        assert_close(alone, found)


class TiedPair(nn.Module):
    """Two linear layers that share all parameters, against one that is called twice."""

    def __init__(self, *, modules: int) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4) if modules == 2 else self.first
        self.second.weight, self.second.bias = self.first.weight, self.first.bias

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(images[:, 0, 0, :4]).tanh())[:, :3]


def test_layers_that_share_all_parameters_are_one_layer_used_twice() -> None:
    found = []
    for modules in (1, 2):
        torch.manual_seed(0)
        model = TiedPair(modules=modules)
        optimizer = SP.build_for(model)
        go_on(model, optimizer, range(3), Exchange(), [[12]], torch.float32)
        assert len(optimizer.coverage.layers) == 1
        found.append(weights(model)["first.weight"])
    torch.testing.assert_close(*found)


def test_frozen_parameters_stay() -> None:
    model = small_net()
    model.conv1.requires_grad_(False)
    model.head.bias.requires_grad_(False)
    before = weights(model)
    optimizer = SP.build_for(model)
    go_on(model, optimizer, range(3), Exchange(), [[12]])
    after = weights(model)
    assert torch.equal(after["conv1.weight"], before["conv1.weight"])
    assert torch.equal(after["head.bias"], before["head.bias"])
    assert "conv1" not in {b.name for b in optimizer.curvature.blocks}
    assert next(b for b in optimizer.curvature.blocks if b.name == "head").inputs.side == 4


def test_memory_layout_changes_nothing_and_gradients_are_only_read() -> None:
    found = []
    for layout in (torch.contiguous_format, torch.channels_last):
        model = seeded(Mixed).to(memory_format=layout)
        optimizer = SP.model_copy(update={"rescale_weights": True}).build_for(model)
        for step in range(3):
            images, targets = samples(step, dtype=torch.float32)
            optimizer.begin(12)
            model.zero_grad()
            losses = losses_of(model, images.contiguous(memory_format=layout), targets)
            (losses.sum() / 12).backward()
            for param in model.parameters():
                if param.grad is not None and param.ndim == 4:
                    param.grad = param.grad.contiguous(memory_format=layout)
            grads = {
                n: (p.grad, p.grad.clone())
                for n, p in model.named_parameters()
                if p.grad is not None
            }
            optimizer.step()
            for name, param in model.named_parameters():
                if name in grads:
                    assert param.grad is grads[name][0]
                    assert torch.equal(param.grad, grads[name][1]), name
        found.append(weights(model))
    assert_close(*found, rtol=1e-4)


def test_training_under_bf16_autocast_stays_finite() -> None:
    model = seeded(Mixed)
    optimizer = SP.build_for(model)
    for step in range(5):
        with torch.autocast("cpu", torch.bfloat16):
            train_step(model, optimizer, [samples(step, dtype=torch.float32)], 12)
    assert all(value.isfinite().all() for value in weights(model).values())
    assert all(b.parts for b in optimizer.curvature.blocks)
    values = [p.value for b in optimizer.curvature.blocks for p in b.parts.values()]
    assert all(v is None or v.dtype is torch.float32 for v in values)


# --- what follows the batch and the learning rate -------------------------------------------------


def test_damping_and_intervals_follow_the_batch() -> None:
    config = KFAC.model_copy(update={"reference_batch": 12, "factor_interval": 4})
    model = small_net()
    optimizer = config.build_for(model)
    assert optimizer._damping(48) == pytest.approx(5e-3)
    assert optimizer._damping(12) == pytest.approx(1e-2)
    train_step(model, optimizer, [samples(0, 48)], 48)
    assert {p.state.due for b in optimizer.curvature.blocks for p in b.parts.values()} == {1}
    assert {b.inverse_due for b in optimizer.curvature.blocks} == {1}


def test_momentum_keeps_its_ratio_to_the_learning_rate() -> None:
    model = small_net()
    config = SP.model_copy(update={"momentum": 0.8, "momentum_rule": "ratio", "damping": 1e9})
    optimizer = config.build_for(model)
    train_step(model, optimizer, [samples(0)], 12)
    first = optimizer.state[model.head.weight]["momentum_buffer"].clone()
    before = weights(model)["head.weight"]
    set_lr(optimizer, 0.05)
    train_step(model, optimizer, [samples(1)], 12)
    moved = weights(model)["head.weight"] - before
    torch.testing.assert_close(moved, 0.4 * first, rtol=1e-5, atol=1e-9)


def test_the_hooks_can_be_removed() -> None:
    model = small_net()
    optimizer = SP.build_for(model)
    optimizer.close()
    assert not any(module._forward_hooks for module in model.modules())


def test_the_method_of_inversion_does_not_matter_for_dense_forms() -> None:
    found = [
        run(SP.model_copy(update={"inverse": method}), 4, Exchange(), [[12]])[0]
        for method in ("cholesky", "newton_schulz")
    ]
    assert_close(weights(found[0]), weights(found[1]))
