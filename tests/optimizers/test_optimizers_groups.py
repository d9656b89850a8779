"""Grouping rules, their printed form, and the errors for what cannot be grouped."""

from __future__ import annotations

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from torch import nn

from adaptive_platform.errors import UserError
from adaptive_platform.optimizers import (
    AnyOptimizer,
    describe_groups,
    set_lr,
    set_momentum,
    set_progress,
    set_weight_decay,
)
from adaptive_platform.optimizers.lars import LARS, LarsConfig
from adaptive_platform.optimizers.rmsprop_warmup import RMSpropWarmup
from adaptive_platform.optimizers.sgd import SgdConfig


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))


def test_the_grouping_is_printed_with_every_name() -> None:
    optimizer = SgdConfig(weight_decay=0.1, excluded_lr_scale=0.5).build(net().named_parameters())
    assert describe_groups(optimizer).splitlines() == [
        "group decay: 2 tensors, 20 elements, weight decay 0.1, learning rate x1",
        "  0.weight (4, 3, 1, 1)",
        "  3.weight (2, 4)",
        "group excluded: 4 tensors, 14 elements, weight decay 0, learning rate x0.5",
        "  0.bias (4,)",
        "  1.weight (4,)",
        "  1.bias (4,)",
        "  3.bias (2,)",
    ]


def test_without_exclusion_there_is_one_group() -> None:
    optimizer = LarsConfig(exclude="none").build(net().named_parameters())
    assert [(g["name"], len(g["params"]), g["layerwise"]) for g in optimizer.param_groups] == [
        ("decay", 6, True)
    ]


def test_plain_parameters_can_be_described_too() -> None:
    text = describe_groups(LARS([nn.Parameter(torch.ones(2, 2))], lr=1.0))
    assert text.splitlines()[1] == "  parameter 0 (2, 2)"


def test_a_frozen_model_is_refused() -> None:
    with pytest.raises(UserError, match="no parameter is trainable"):
        SgdConfig().build(net().requires_grad_(False).named_parameters())


def test_sparse_gradients_are_refused_by_name() -> None:
    layer = nn.Embedding(4, 2, sparse=True)
    optimizer = LarsConfig().build([("embedding.weight", layer.weight)])
    layer(torch.tensor([1])).sum().backward()
    with pytest.raises(UserError, match=r"embedding\.weight has a sparse gradient.*sparse=False"):
        optimizer.step()


def test_set_lr_fills_a_tensor_in_place_and_knows_no_scale_by_default() -> None:
    rate = torch.tensor(0.1)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=rate)
    set_lr(optimizer, 0.5)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.5


def test_weight_decay_moves_where_there_is_some() -> None:
    optimizer = SgdConfig(weight_decay=1e-4).build(net().named_parameters())
    set_weight_decay(optimizer, 5e-5)
    assert [g["weight_decay"] for g in optimizer.param_groups] == [5e-5, 0.0]


def test_momentum_moves_also_as_the_first_beta() -> None:
    param = nn.Parameter(torch.ones(2, 2))
    lars, adamw = LARS([param], lr=1.0), torch.optim.AdamW([param])
    for optimizer in (lars, adamw):
        set_momentum(optimizer, 0.95)
    assert lars.param_groups[0]["momentum"] == 0.95
    assert adamw.param_groups[0]["betas"] == (0.95, 0.999)
    with pytest.raises(UserError, match="Adagrad has no momentum to set"):
        set_momentum(torch.optim.Adagrad([param]), 0.95)


def test_progress_reaches_only_those_who_ask() -> None:
    param = nn.Parameter(torch.ones(1))
    asks = RMSpropWarmup([param], lr=0.1)
    set_progress(asks, 100.0)
    assert asks.sgd_share == 1.0
    set_progress(torch.optim.SGD([param], lr=0.1), 100.0)


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"kind": "sgd", "lr": -1}, "greater than 0"),
        ({"kind": "sgd", "momentum": 1}, "less than 1"),
        ({"kind": "sgd", "momentum": 0, "nesterov": True}, "needs momentum > 0"),
        ({"kind": "sgd", "nesterov": True, "foreach": True}, "set it to null"),
        ({"kind": "sgd", "exclude": "none", "excluded_lr_scale": 0.5}, "leave it at 1"),
        ({"kind": "lamb", "weight_norm_bounds": [2, 1]}, "low < high"),
        ({"kind": "adamw", "betas": [0.9, 1.0]}, "less than 1"),
        ({"kind": "lars", "form": "larc"}, "'paper'"),
        ({"kind": "adam"}, "adamw"),
    ],
)
def test_what_makes_no_sense_is_refused(given: dict[str, object], word: str) -> None:
    with pytest.raises(ValidationError, match=word):
        TypeAdapter(AnyOptimizer).validate_python(given)
