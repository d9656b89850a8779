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


def test_nesterov_is_torchs_own_form() -> None:
    layers = [nn.Linear(3, 2) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    ours = SgdConfig(nesterov=True, weight_decay=0.1).build(layers[0].named_parameters())
    theirs = torch.optim.SGD(
        [
            {"params": [layers[1].weight], "weight_decay": 0.1},
            {"params": [layers[1].bias], "weight_decay": 0.0},
        ],
        lr=0.1,
        momentum=0.9,
        nesterov=True,
        foreach=False,
    )
    for step in range(5):
        for layer, optimizer in zip(layers, (ours, theirs), strict=True):
            torch.manual_seed(step)
            for param in layer.parameters():
                param.grad = torch.randn(param.shape)
            set_lr(optimizer, 0.1 * (step + 1))
            optimizer.step()
    torch.testing.assert_close(list(layers[0].parameters()), list(layers[1].parameters()))
