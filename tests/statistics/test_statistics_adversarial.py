from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adaptive_platform.statistics.adversarial import fgsm, num_adversarial


@given(st.floats(0.001, 0.5), st.integers(0, 100))
def test_no_element_moves_further_than_epsilon_or_out_of_range(epsilon: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    inputs, weight = torch.randn(2, 8, generator=generator)
    moved = fgsm(lambda x: (x * weight).sum(), inputs, epsilon)
    assert float((moved - inputs).abs().max()) <= epsilon + 1e-6
    assert inputs.min() <= moved.min()
    assert moved.max() <= inputs.max()
    assert float((moved * weight).sum()) > float((inputs * weight).sum())


def test_parameters_and_inputs_are_left_alone() -> None:
    net = torch.nn.Linear(3, 1)
    inputs = torch.randn(4, 3)
    before = inputs.clone()
    moved = fgsm(lambda x: net(x).square().mean(), inputs)
    assert net.weight.grad is None
    assert torch.equal(inputs, before)
    assert not moved.requires_grad


def test_a_broken_gradient_moves_nothing() -> None:
    inputs = torch.tensor([0.0, 1.0])
    moved = fgsm(lambda x: (x.sqrt() * torch.tensor([0.0, -1.0])).sum(), inputs, 0.1)
    assert moved.tolist() == pytest.approx([0.0, 0.9])


@pytest.mark.parametrize(
    ("fraction", "microbatch", "count"),
    [(0.2, 128, 25), (0.1, 128, 12), (0.0, 128, 0), (0.2, 5, 0), (0.2, 6, 1), (1.0, 4, 4)],
)
def test_share_of_a_microbatch(fraction: float, microbatch: int, count: int) -> None:
    assert num_adversarial(fraction, microbatch) == count
