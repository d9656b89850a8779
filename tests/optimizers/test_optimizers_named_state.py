"""Optimizer state under parameter names: what is refused, and that refusing changes nothing."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from adaptive_platform.errors import CheckpointError
from adaptive_platform.optimizers import load_named_state, named_state
from adaptive_platform.optimizers.adamw import AdamWConfig
from adaptive_platform.optimizers.lamb import LambConfig
from adaptive_platform.optimizers.sgd import SgdConfig


def trained(
    config: SgdConfig | AdamWConfig | LambConfig,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = config.build(model.named_parameters())
    model(torch.ones(5, 3)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def test_state_is_keyed_by_name_and_loads_as_plain_tensors(tmp_path: Path) -> None:
    model, optimizer = trained(LambConfig())
    state = named_state(optimizer, model.named_parameters())
    assert set(state) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert state["0.weight"]["step"] == 1
    torch.save(state, tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    assert torch.equal(loaded["1.bias"]["exp_avg"], state["1.bias"]["exp_avg"])


def test_state_survives_another_grouping() -> None:
    model, optimizer = trained(SgdConfig())
    state = copy.deepcopy(named_state(optimizer, model.named_parameters()))
    regrouped = SgdConfig(exclude="none").build(reversed(list(model.named_parameters())))
    load_named_state(regrouped, model.named_parameters(), state)
    for name, param in model.named_parameters():
        assert torch.equal(
            regrouped.state[param]["momentum_buffer"], state[name]["momentum_buffer"]
        )


def test_loaded_tensors_are_copies_in_the_layout_of_the_parameter() -> None:
    param = nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
    optimizer = SgdConfig().build([("w", param)])
    saved = {"w": {"momentum_buffer": torch.randn(4, 3, 2, 2)}}
    load_named_state(optimizer, [("w", param)], saved)
    buffer = optimizer.state[param]["momentum_buffer"]
    assert buffer.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(buffer, saved["w"]["momentum_buffer"])
    buffer.zero_()
    assert saved["w"]["momentum_buffer"].abs().sum() > 0


def test_parameters_without_saved_state_start_afresh() -> None:
    model, optimizer = trained(SgdConfig())
    load_named_state(optimizer, model.named_parameters(), {})
    assert named_state(optimizer, model.named_parameters()) == {}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.update({"9.weight": {}}), ["9.weight", "does not train"]),
        (
            lambda s: s["0.weight"].update(momentum_buffer=torch.ones(4, 4)),
            ["0.weight", "(4, 4)", "(4, 3)"],
        ),
        (
            lambda s: s["1.bias"].update(exp_avg=torch.ones(2)),
            ["1.bias", "exp_avg", "SGD", "momentum_buffer"],
        ),
    ],
)
def test_foreign_state_is_refused_and_nothing_is_touched(change, words) -> None:  # type: ignore[no-untyped-def]
    model, optimizer = trained(SgdConfig())
    before = copy.deepcopy(named_state(optimizer, model.named_parameters()))
    foreign = copy.deepcopy(before)
    change(foreign)
    with pytest.raises(CheckpointError) as caught:
        load_named_state(optimizer, model.named_parameters(), foreign)
    assert all(word in str(caught.value) for word in words), caught.value
    after = named_state(optimizer, model.named_parameters())
    for name, values in before.items():
        assert torch.equal(after[name]["momentum_buffer"], values["momentum_buffer"])


def test_an_optimizer_over_parameters_of_another_model_is_refused() -> None:
    _, optimizer = trained(AdamWConfig())
    with pytest.raises(CheckpointError, match="not in the model"):
        named_state(optimizer, nn.Linear(3, 4).named_parameters())
