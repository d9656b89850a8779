"""P g against the formula written out: Adam's average of squares, whatever layout it lies in."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from adaptive_platform.optimizers import AdamPreconditioner
from adaptive_platform.optimizers.adamw import AdamWConfig
from adaptive_platform.optimizers.lamb import LambConfig

CONFIGS = [
    AdamWConfig(eps=1e-3),
    AdamWConfig(eps=1e-3, amsgrad=True),
    LambConfig(eps=1e-3),
    LambConfig(eps=1e-3, bias_correction=False),
]


def names(config) -> str:
    return f"{config.kind}-{getattr(config, 'amsgrad', '')}{getattr(config, 'bias_correction', '')}"


def stepped(config, steps: int, memory_format=torch.contiguous_format):
    """A net after that many steps on random gradients, its optimizer and the gradients seen."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1), nn.Flatten(), nn.Linear(8, 2))
    net = net.to(memory_format=memory_format)
    optimizer = config.build(net.named_parameters())
    seen = []
    for step in range(steps):
        for parameter in net.parameters():
            parameter.grad = torch.randn_like(parameter) * (1 + step)
        seen.append([p.grad.clone() for p in net.parameters()])
        optimizer.step()
    return list(net.parameters()), optimizer, seen


def expected(config, seen, gradients) -> list[torch.Tensor]:
    """`g / (sqrt(v^) + eps)`, from all gradients so far, in float64."""
    beta = config.betas[1]
    found = []
    for index, gradient in enumerate(gradients):
        average = torch.zeros_like(gradient, dtype=torch.float64)
        largest = average.clone()
        for step in seen:
            average = beta * average + (1 - beta) * step[index].double().square()
            largest = torch.maximum(largest, average)
        if getattr(config, "amsgrad", False):
            average = largest
        if getattr(config, "bias_correction", True):
            average = average / (1 - beta ** len(seen))
        found.append(gradient.double() / (average.sqrt() + config.eps))
    return found


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("config", CONFIGS, ids=names)
def test_norms_are_those_of_the_published_formula(config, memory_format):
    parameters, optimizer, seen = stepped(config, 7, memory_format)
    preconditioner = AdamPreconditioner(optimizer)
    preconditioner.begin()
    assert preconditioner.active
    gradients = [torch.randn_like(p) for p in parameters]
    scaled = expected(config, seen, gradients)
    found = preconditioner.sqnorms(parameters, gradients)
    torch.testing.assert_close(
        found.double(), torch.stack([g.square().sum() for g in scaled]), rtol=1e-5, atol=0
    )
    for ours, theirs in zip(preconditioner.scaled(parameters, gradients), scaled, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-6)


def test_another_layout_of_the_gradient_changes_nothing():
    parameters, optimizer, _ = stepped(AdamWConfig(), 7, torch.channels_last)
    preconditioner = AdamPreconditioner(optimizer)
    preconditioner.begin()
    gradients = [torch.randn_like(p) for p in parameters]
    moved = [g.contiguous() for g in gradients]
    assert any(g.stride() != m.stride() for g, m in zip(gradients, moved, strict=True))
    torch.testing.assert_close(
        preconditioner.sqnorms(parameters, moved), preconditioner.sqnorms(parameters, gradients)
    )


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_in_the_order_of_memory_add_up(memory_format, dtype):
    parameters, optimizer, _ = stepped(AdamWConfig(eps=1e-3), 7, memory_format)
    # One whose average lies in another order than the parameter itself.
    state = optimizer.state[parameters[0]]
    state["exp_avg_sq"] = state["exp_avg_sq"].contiguous()
    preconditioner = AdamPreconditioner(optimizer)
    preconditioner.begin()
    gradients = [torch.randn_like(p).to(dtype) for p in parameters]
    whole = preconditioner.sqnorms(parameters, gradients)
    total = torch.zeros_like(whole)
    for share in range(3):
        bounds = [(p.numel() * share // 3, p.numel() * (share + 1) // 3) for p in parameters]
        parts = [
            g.as_strided((g.numel(),), (1,))[low:high]
            for g, (low, high) in zip(gradients, bounds, strict=True)
        ]
        total += preconditioner.part_sqnorms(parameters, bounds, parts)
    torch.testing.assert_close(total, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [1, 2**17, 2**17 + 1, 300_000])
def test_large_tensors_are_taken_piece_by_piece(size):
    parameter = nn.Parameter(torch.zeros(size))
    optimizer = torch.optim.AdamW([parameter])
    for _ in range(5):
        parameter.grad = torch.full_like(parameter, 2.0)
        optimizer.step()
    preconditioner = AdamPreconditioner(optimizer)
    preconditioner.begin()
    found = preconditioner.sqnorms([parameter], [torch.full((size,), 3.0)])
    assert found.tolist() == pytest.approx([size * 2.25], rel=1e-4)


def test_it_is_the_identity_for_five_steps():
    for steps, active in ((0, False), (4, False), (5, True)):
        _, optimizer, _ = stepped(AdamWConfig(), steps)
        preconditioner = AdamPreconditioner(optimizer)
        preconditioner.begin()
        assert preconditioner.active == active


def test_what_has_no_average_yet_is_left_out():
    old, young = (nn.Parameter(torch.zeros(2)) for _ in range(2))
    optimizer = torch.optim.AdamW([old, young])
    for step in range(6):
        old.grad = torch.tensor([1.0, 0.0])
        young.grad = torch.ones(2) if step > 3 else None
        optimizer.step()
    preconditioner = AdamPreconditioner(optimizer)
    preconditioner.begin()
    gradients = [torch.tensor([2.0, 1e-3]), torch.ones(2)]
    assert preconditioner.sqnorms([old, young], gradients).tolist() == pytest.approx([4.0, 0.0])
    scaled = preconditioner.scaled([old, young], gradients)
    assert scaled[0].tolist() == pytest.approx([2.0, 0.0])
    assert scaled[1].tolist() == [0.0, 0.0]


def test_half_precision_is_widened():
    parameter = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW([parameter])
    for _ in range(5):
        parameter.grad = torch.full_like(parameter, 0.5)
        optimizer.step()
    preconditioner = AdamPreconditioner(optimizer)
    preconditioner.begin()
    found = preconditioner.sqnorms([parameter], [torch.ones(3, dtype=torch.bfloat16)])
    assert found.dtype is torch.float32
    assert found.item() == pytest.approx(12.0, rel=0.02)


def test_gradients_and_optimizer_are_left_alone():
    parameters, optimizer, _ = stepped(AdamWConfig(), 7)
    before = [optimizer.state[p]["exp_avg_sq"].clone() for p in parameters]
    gradients = [torch.randn_like(p) for p in parameters]
    copies = [g.clone() for g in gradients]
    preconditioner = AdamPreconditioner(optimizer)
    preconditioner.begin()
    preconditioner.sqnorms(parameters, gradients)
    preconditioner.scaled(parameters, gradients)
    assert all(torch.equal(a, b) for a, b in zip(gradients, copies, strict=True))
    kept = (optimizer.state[p]["exp_avg_sq"] for p in parameters)
    assert all(torch.equal(a, b) for a, b in zip(kept, before, strict=True))
