"""What holds for every optimizer, whoever writes the next one: found by kind, tested unseen."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from adaptive_platform.optimizers import (
    OptimizerConfig,
    load_named_state,
    named_state,
    set_lr,
    set_progress,
)
from adaptive_platform.settings import variants_of

VARIANTS = [
    *(cls() for cls in variants_of(OptimizerConfig).values() if not cls.needs_model),
    *(
        variants_of(OptimizerConfig)["lars"].model_validate({"form": form})
        for form in ("corrected", "unscaled", "clip")
    ),
    variants_of(OptimizerConfig)["sgd"].model_validate({"nesterov": True}),
    variants_of(OptimizerConfig)["sgd"].model_validate({"foreach": True}),
    variants_of(OptimizerConfig)["adamw"].model_validate({"amsgrad": True, "foreach": True}),
]
every_optimizer = pytest.mark.parametrize(
    "config",
    VARIANTS,
    ids=lambda c: " ".join(
        [c.kind, *(f"{k}={v}" for k, v in c.model_dump(exclude_defaults=True).items())]
    ),
)


class Net(nn.Module):
    """Convolution, norm, a zero-initialised scale, an unused layer, a frozen one, a shared one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.embedding = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5)
        self.head.weight = self.embedding.weight
        self.unused = nn.Linear(2, 2)
        self.frozen = nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
        nn.init.zeros_(self.norm.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, images: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        features = self.norm(self.conv(images)).mean((2, 3)) + self.embedding(ids)
        return self.head(self.frozen(features))


def new_net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def set_gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    images = torch.randn(8, 3, 6, 6, generator=generator)
    ids = torch.randint(5, (8,), generator=generator)
    model.zero_grad()
    nn.functional.cross_entropy(model(images, ids), ids).backward()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        set_gradients(model, step)
        set_lr(optimizer, 0.05 * (1 + step))
        set_progress(optimizer, 2.0 * step)
        optimizer.step()


def bits(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(left: nn.Module, right: nn.Module) -> None:
    for name, value in left.state_dict().items():
        assert torch.equal(value, right.state_dict()[name]), name


@every_optimizer
def test_saved_and_loaded_state_gives_the_same_next_steps(config: OptimizerConfig) -> None:
    model = new_net()
    optimizer = config.build(model.named_parameters())
    train(model, optimizer, range(4))
    saved = copy.deepcopy(named_state(optimizer, model.named_parameters()))
    resumed = copy.deepcopy(model)
    fresh = config.build(resumed.named_parameters())
    load_named_state(fresh, resumed.named_parameters(), saved)
    train(model, optimizer, range(4, 7))
    train(resumed, fresh, range(4, 7))
    assert_same(model, resumed)


@every_optimizer
def test_torch_state_dict_gives_the_same_next_steps(config: OptimizerConfig) -> None:
    model = new_net()
    optimizer = config.build(model.named_parameters())
    train(model, optimizer, range(4))
    resumed = copy.deepcopy(model)
    fresh = config.build(resumed.named_parameters())
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, range(4, 7))
    train(resumed, fresh, range(4, 7))
    assert_same(model, resumed)


@every_optimizer
def test_state_without_which_the_next_step_differs_is_saved(config: OptimizerConfig) -> None:
    model = new_net()
    optimizer = config.build(model.named_parameters())
    train(model, optimizer, range(4))
    forgetful = copy.deepcopy(model)
    train(model, optimizer, range(4, 5))
    train(forgetful, config.build(forgetful.named_parameters()), range(4, 5))
    assert not torch.equal(model.conv.weight, forgetful.conv.weight)


@every_optimizer
def test_gradients_are_read_and_not_written(config: OptimizerConfig) -> None:
    model = new_net()
    optimizer = config.build(model.named_parameters())
    for step in range(3):
        set_gradients(model, step)
        before = {
            n: (p.grad, p.grad.clone()) for n, p in model.named_parameters() if p.grad is not None
        }
        optimizer.step()
        for name, param in model.named_parameters():
            if param.grad is not None:
                assert param.grad is before[name][0]
                assert torch.equal(param.grad, before[name][1]), name


@every_optimizer
def test_frozen_and_unused_parameters_stay_and_have_no_state(config: OptimizerConfig) -> None:
    model = new_net()
    before = bits(model)
    optimizer = config.build(model.named_parameters())
    train(model, optimizer, range(3))
    after = model.state_dict()
    for name in ("frozen.weight", "frozen.bias", "unused.weight", "unused.bias"):
        assert torch.equal(after[name], before[name])
    assert not {
        n for n in named_state(optimizer, model.named_parameters()) if "us" in n or "fr" in n
    }
    names = [n for group in optimizer.param_groups for n in group["param_names"]]
    assert not any(name.startswith("frozen") for name in names)


@every_optimizer
def test_a_shared_parameter_counts_once_and_stays_shared(config: OptimizerConfig) -> None:
    model = new_net()
    optimizer = config.build(model.named_parameters(remove_duplicate=False))
    names = [n for group in optimizer.param_groups for n in group["param_names"]]
    assert "embedding.weight" in names
    assert "head.weight" not in names
    reference = new_net()
    train(model, optimizer, range(3))
    train(reference, config.build(reference.named_parameters()), range(3))
    assert_same(model, reference)
    assert model.head.weight is model.embedding.weight


@every_optimizer
def test_zero_initialised_parameters_move_and_all_stays_finite(config: OptimizerConfig) -> None:
    for exclude in ("norm_and_bias", "none"):
        model = new_net()
        chosen = config.model_copy(update={"exclude": exclude})
        train(model, chosen.build(model.named_parameters()), range(5))
        assert model.norm.weight.abs().sum() > 0
        assert model.head.bias.abs().sum() > 0
        assert all(value.isfinite().all() for value in model.state_dict().values())


@every_optimizer
def test_a_zero_gradient_without_decay_leaves_its_parameter_unchanged(
    config: OptimizerConfig,
) -> None:
    param = nn.Parameter(torch.randn(3, 4))
    before = param.detach().clone()
    optimizer = config.model_copy(update={"weight_decay": 0.0}).build([("weight", param)])
    for _ in range(5):
        param.grad = torch.zeros_like(param)
        optimizer.step()
    assert torch.equal(param.detach(), before)


@every_optimizer
def test_norms_and_biases_are_left_alone_by_decay_and_the_others_shrink(
    config: OptimizerConfig,
) -> None:
    model = new_net()
    nn.init.ones_(model.norm.weight)
    nn.init.ones_(model.head.bias)
    config = config.model_copy(update={"weight_decay": 0.1})
    optimizer = config.build(model.named_parameters())
    for resumed in (False, True):
        if resumed:
            state = named_state(optimizer, model.named_parameters())
            optimizer = config.build(model.named_parameters())
            load_named_state(optimizer, model.named_parameters(), state)
        before = bits(model)
        for param in model.parameters():
            param.grad = torch.zeros_like(param) if param.requires_grad else None
        set_lr(optimizer, 0.1)
        optimizer.step()
        for name, param in model.named_parameters():
            if param.ndim <= 1 or name.startswith("frozen"):
                assert torch.equal(param, before[name]), name
            else:
                assert param.norm() < before[name].norm(), name


@every_optimizer
def test_memory_layout_does_not_change_the_step(config: OptimizerConfig) -> None:
    results = []
    for of_weights in (torch.contiguous_format, torch.channels_last):
        for of_gradients in (torch.contiguous_format, torch.channels_last):
            model = new_net().to(memory_format=of_weights)
            optimizer = config.build(model.named_parameters())
            for step in range(3):
                torch.manual_seed(step)
                for param in model.parameters():
                    param.grad = torch.randn(param.shape)
                    if param.ndim == 4:
                        param.grad = param.grad.clone(memory_format=of_gradients)
                optimizer.step()
            results.append(model)
    for other in results[1:]:
        for name, value in results[0].state_dict().items():
            torch.testing.assert_close(other.state_dict()[name], value, rtol=1e-5, atol=1e-6)


@every_optimizer
def test_gradients_may_be_views_of_one_flat_buffer(config: OptimizerConfig) -> None:
    plain, viewed = new_net(), new_net()
    optimizers = [config.build(m.named_parameters()) for m in (plain, viewed)]
    for step in range(3):
        for model, optimizer in zip((plain, viewed), optimizers, strict=True):
            set_gradients(model, step)
            if model is viewed:
                with_grad = [p for p in model.parameters() if p.grad is not None]
                flat = torch.cat([p.grad.flatten() for p in with_grad])
                for param, part in zip(
                    with_grad, flat.split([p.numel() for p in with_grad]), strict=True
                ):
                    param.grad = part.view_as(param)
            optimizer.step()
    assert_same(plain, viewed)


@every_optimizer
def test_the_excluded_group_has_its_own_rate(config: OptimizerConfig) -> None:
    model = new_net()
    optimizer = config.model_copy(update={"excluded_lr_scale": 0.25}).build(
        model.named_parameters()
    )
    for _ in range(2):  # twice, as after a resume: no factor is applied twice
        set_lr(optimizer, 0.8)
    assert {g["name"]: g["lr"] for g in optimizer.param_groups} == {"decay": 0.8, "excluded": 0.2}


@every_optimizer
def test_low_precision_parameters_keep_their_type_and_stay_finite(config: OptimizerConfig) -> None:
    param = nn.Parameter(torch.full((300, 300), 3.0, dtype=torch.float16))  # |w|^2 > 65,504
    optimizer = config.build([("weight", param)])
    for _ in range(2):
        param.grad = torch.full_like(param, 2.0)
        optimizer.step()
    assert param.dtype is torch.float16
    assert param.isfinite().all()
    assert param.mean() < 3.0


@every_optimizer
def test_training_under_bf16_autocast_stays_finite(config: OptimizerConfig) -> None:
    model = new_net()
    optimizer = config.build(model.named_parameters())
    for step in range(5):
        with torch.autocast("cpu", torch.bfloat16):
            set_gradients(model, step)
        optimizer.step()
    assert all(value.isfinite().all() for value in model.state_dict().values())
    assert all(param.dtype is torch.float32 for param in model.parameters())


@every_optimizer
def test_the_loss_falls(config: OptimizerConfig) -> None:
    weight = nn.Parameter(torch.tensor([[3.0, -4.0]]))
    optimizer = config.build([("weight", weight)])
    for _ in range(20):
        optimizer.zero_grad()
        weight.square().sum().backward()
        optimizer.step()
    assert weight.norm() < 5.0


@every_optimizer
def test_a_closure_is_called_with_gradients_on(config: OptimizerConfig) -> None:
    param = nn.Parameter(torch.ones(2, 2))
    optimizer = config.build([("weight", param)])

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 4.0
    assert (param < 1).all()
