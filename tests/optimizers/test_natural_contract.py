"""What holds for every optimizer that listens to the model: found by kind, tested unseen."""

from __future__ import annotations

import copy

import pytest
import torch
from natural_nets import reduce_gradients, samples, small_net, train_step, weights
from torch import nn

from adaptive_platform.errors import UserError
from adaptive_platform.optimizers import (
    Exchange,
    OptimizerConfig,
    describe_groups,
    load_named_state,
    named_state,
    set_lr,
)
from adaptive_platform.optimizers.natural.driven import ListeningOptimizer
from adaptive_platform.settings import variants_of

SHORTER = {"tngd": {"duration": 3.0}}
"""Settings that save time and change nothing that is asked here."""
CONFIGS = [
    cls().model_copy(update=SHORTER.get(kind, {}))
    for kind, cls in variants_of(OptimizerConfig).items()
    if cls.needs_model
]
every_config = pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.kind)


def build(config: OptimizerConfig, model: nn.Module) -> ListeningOptimizer:
    optimizer = config.build_for(model)
    assert isinstance(optimizer, ListeningOptimizer)
    return optimizer


def test_all_four_are_found() -> None:
    assert {config.kind for config in CONFIGS} == {"sp_ngd", "kfac", "fngd", "tngd"}


def test_first_order_kinds_build_for_a_model_too() -> None:
    model = small_net()
    optimizer = variants_of(OptimizerConfig)["lars"]().build_for(model, Exchange())
    assert len(optimizer.param_groups[0]["params"]) == 4


@every_config
def test_the_groups_are_printed_and_take_a_learning_rate(config: OptimizerConfig) -> None:
    config = config.model_copy(update={"excluded_lr_scale": 0.5})
    optimizer = build(config, small_net())
    set_lr(optimizer, 0.2)
    assert {g["name"]: g["lr"] for g in optimizer.param_groups} == {"decay": 0.2, "excluded": 0.1}
    assert "conv1.weight" in describe_groups(optimizer)
    assert "natural gradient" in optimizer.describe()


@every_config
def test_momentum_travels_by_name_and_the_rest_in_one_dict(config: OptimizerConfig) -> None:
    """As a checkpoint keeps them."""
    model = small_net()
    optimizer = build(config, model)
    for step in range(3):
        train_step(model, optimizer, [samples(step)], 12)
    kept = copy.deepcopy(
        (named_state(optimizer, model.named_parameters()), optimizer.natural_state())
    )
    resumed = small_net()
    resumed.load_state_dict(model.state_dict())
    fresh = build(config, resumed)
    load_named_state(fresh, resumed.named_parameters(), kept[0])
    fresh.load_natural_state(kept[1])
    for step in range(3, 5):
        train_step(model, optimizer, [samples(step)], 12)
        train_step(resumed, fresh, [samples(step)], 12)
    for name, value in weights(model).items():
        assert torch.equal(value, weights(resumed)[name]), name


@every_config
def test_gradients_are_read_and_not_written(config: OptimizerConfig) -> None:
    model = small_net()
    optimizer = build(config, model)
    optimizer.begin(12)
    images, targets = samples(0)
    nn.functional.cross_entropy(model(images), targets).backward()
    reduce_gradients(model, Exchange())
    before = {n: (p.grad, p.grad.clone()) for n, p in model.named_parameters()}
    optimizer.step()
    for name, param in model.named_parameters():
        assert param.grad is before[name][0]
        assert torch.equal(param.grad, before[name][1])


@every_config
def test_weights_shrink_by_decay_and_norms_and_biases_do_not(config: OptimizerConfig) -> None:
    model = small_net()
    config = config.model_copy(update={"weight_decay": 0.5})
    optimizer = build(config, model)
    before = weights(model)
    optimizer.begin(12)
    (model(samples(0)[0]) * 0.0).sum().backward()
    optimizer.step()
    for name, value in weights(model).items():
        if value.ndim == 1:
            assert torch.equal(value, before[name]), name
        else:
            assert value.norm() < before[name].norm(), name


@every_config
def test_the_loss_falls(config: OptimizerConfig) -> None:
    model = small_net()
    optimizer = build(config, model)
    images, targets = samples(0)
    first = float(nn.functional.cross_entropy(model(images), targets).detach())
    for _ in range(10):
        train_step(model, optimizer, [(images, targets)], 12)
    assert float(nn.functional.cross_entropy(model(images), targets).detach()) < first


@every_config
def test_a_closure_is_called_with_gradients_on(config: OptimizerConfig) -> None:
    model = small_net()
    optimizer = build(config, model)
    images, targets = samples(0)

    def closure() -> torch.Tensor:
        optimizer.begin(12)
        loss = nn.functional.cross_entropy(model(images), targets)
        loss.backward()
        return loss.detach()

    assert float(optimizer.step(closure)) > 0


@every_config
def test_a_step_without_begin_or_after_a_drop_is_refused(config: OptimizerConfig) -> None:
    model = small_net()
    optimizer = build(config, model)
    with pytest.raises(UserError, match="begin"):
        optimizer.step()
    optimizer.begin(12)
    optimizer.discard()
    with pytest.raises(UserError, match="begin"):
        optimizer.step()


@every_config
def test_nothing_trainable_is_refused(config: OptimizerConfig) -> None:
    model = small_net()
    model.requires_grad_(False)
    with pytest.raises(UserError, match="trainable"):
        config.build_for(model)


@every_config
def test_without_the_model_it_is_refused(config: OptimizerConfig) -> None:
    with pytest.raises(UserError, match="build_for"):
        config.build(small_net().named_parameters())


@every_config
def test_closing_leaves_the_model_without_hooks(config: OptimizerConfig) -> None:
    model = small_net()
    build(config, model).close()
    hooks = [m._forward_hooks or m._forward_pre_hooks for m in model.modules()]
    assert not any(hooks)
