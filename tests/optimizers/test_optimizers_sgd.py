"""torch's momentum buffer needs no momentum correction, and its fast paths have traps."""

from __future__ import annotations

import torch
from torch import nn

from adaptive_platform.optimizers import set_lr
from adaptive_platform.optimizers.sgd import SgdConfig

RATES = [0.1, 0.1, 1.0, 1.0]


def test_weights_follow_the_reference_form_when_the_rate_moves() -> None:
    param = nn.Parameter(torch.zeros(1, 1, dtype=torch.float64))
    optimizer = SgdConfig(weight_decay=0.0).build([("w", param)])
    seen = []
    for rate in RATES:
        set_lr(optimizer, rate)
        param.grad = torch.ones_like(param)
        optimizer.step()
        seen.append(param.item())
    assert torch.allclose(torch.tensor(seen), torch.tensor([-0.1, -0.29, -3.0, -6.439]))


def test_the_stored_step_form_with_correction_is_the_same() -> None:
    weight, stored, last = 0.0, 0.0, RATES[0]
    seen = []
    for rate in RATES:
        stored = 0.9 * (rate / last) * stored + rate * 1.0
        weight, last = weight - stored, rate
        seen.append(weight)
    assert torch.allclose(torch.tensor(seen), torch.tensor([-0.1, -0.29, -3.0, -6.439]))


def test_nesterov_leaves_the_gradients_of_undecayed_parameters_alone() -> None:
    bias = nn.Parameter(torch.ones(3))
    optimizer = SgdConfig(nesterov=True).build([("bias", bias)])
    assert optimizer.param_groups[0]["foreach"] is False  # on accelerators null would mean true
    for _ in range(2):
        bias.grad = torch.full((3,), 2.0)
        optimizer.step()
        assert bias.grad.tolist() == [2.0, 2.0, 2.0]
