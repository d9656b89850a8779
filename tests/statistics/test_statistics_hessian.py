from __future__ import annotations

import math

import pytest
import torch

from adaptive_platform.statistics.hessian import hessian_vector_product, lanczos, power_iteration


def start(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def diagonal(*values: float):
    return lambda vector: torch.tensor(values, dtype=torch.float64) * vector


def test_power_iteration_on_the_sheets_quadratic() -> None:
    x = torch.tensor([0.3, -2.0], dtype=torch.float64, requires_grad=True)
    curvature = torch.tensor([3.0, 1.0], dtype=torch.float64)
    product = hessian_vector_product(lambda: 0.5 * (curvature * x.square()).sum(), [x])
    found = power_iteration(product, start(2), iterations=100, tolerance=1e-10)
    assert found.value == pytest.approx(3)
    assert found.converged
    assert x.grad is None


def test_narrow_parameters_have_a_curvature_in_the_vectors_type() -> None:
    """Also beside wide ones: norm layers often stay in float32."""
    narrow = torch.tensor([0.5, -2.0], dtype=torch.bfloat16, requires_grad=True)
    wide = torch.tensor([1.0], requires_grad=True)
    product = hessian_vector_product(
        lambda: 1.5 * narrow.square().sum().float() + 4.0 * wide.square().sum(), [narrow, wide]
    )
    assert product(torch.ones(3)).tolist() == [3.0, 3.0, 8.0]
    found = power_iteration(product, start(3).float(), iterations=100, tolerance=1e-6)
    assert found.value == pytest.approx(8.0, rel=1e-2)
    alone = hessian_vector_product(lambda: 1.5 * narrow.square().sum(), [narrow])
    assert power_iteration(alone, start(2).float()).value == pytest.approx(3.0, rel=1e-2)


def test_power_iteration_finds_the_largest_magnitude_lanczos_both_ends() -> None:
    product = diagonal(-5.0, 3.0, 1.0, 0.0)
    assert power_iteration(
        product, start(4), iterations=200, tolerance=1e-12
    ).value == pytest.approx(-5)
    assert lanczos(product, start(4)) == pytest.approx([-5, 0, 1, 3], abs=1e-9)


def test_it_stops_at_the_tolerance_or_says_that_it_did_not() -> None:
    product = diagonal(1.0, 0.999, 0.5)
    loose = power_iteration(product, start(3), iterations=50, tolerance=0.5)
    assert loose.converged
    assert loose.iterations < 10
    strict = power_iteration(product, start(3), iterations=3, tolerance=1e-15)
    assert (strict.converged, strict.iterations) == (False, 3)


def test_a_flat_loss_has_eigenvalue_zero() -> None:
    found = power_iteration(diagonal(0.0, 0.0), start(2))
    assert (found.value, found.converged) == (0.0, True)
    assert lanczos(diagonal(0.0, 0.0), start(2)) == [0.0]


def test_workers_average_their_products() -> None:
    shares = [diagonal(4.0, 0.0), diagonal(2.0, 2.0)]

    def rank0(vector: torch.Tensor) -> torch.Tensor:
        return shares[0](vector)

    sent: list[torch.Tensor] = []

    def mean(image: torch.Tensor) -> torch.Tensor:
        # The other worker holds the same vector; undo the first share to find it on the support.
        sent.append(image)
        return 0.5 * (image + shares[1](image / torch.tensor([4.0, 1.0])))

    found = power_iteration(rank0, start(2), all_reduce=mean, iterations=100, tolerance=1e-12)
    assert found.value == pytest.approx(3)
    assert len(sent) == found.iterations


def test_a_network_matches_its_dense_hessian() -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)
    ).double()
    inputs, labels = torch.randn(16, 3).double(), torch.randint(2, (16,))
    parameters = list(net.parameters())

    def loss() -> torch.Tensor:
        return torch.nn.functional.cross_entropy(net(inputs), labels)

    product = hessian_vector_product(loss, parameters)
    size = sum(p.numel() for p in parameters)
    dense = torch.stack([product(row) for row in torch.eye(size).double()])
    torch.testing.assert_close(dense, dense.T)
    exact = torch.linalg.eigvalsh(dense)
    ritz = lanczos(product, start(size), steps=20)
    assert ritz[-1] == pytest.approx(float(exact[-1]), rel=1e-6)
    largest = float(exact[exact.abs().argmax()])
    found = power_iteration(product, start(size), iterations=300, tolerance=1e-9)
    assert found.value == pytest.approx(largest, rel=1e-3)


def test_unused_and_linear_parameters_have_no_curvature() -> None:
    used, linear, unused = (torch.ones(1, requires_grad=True) for _ in range(3))
    product = hessian_vector_product(
        lambda: (2 * used.square() + linear).sum(), [used, linear, unused]
    )
    assert product(torch.ones(3)).tolist() == [4.0, 0.0, 0.0]
    flat = hessian_vector_product(lambda: linear.sum(), [linear])
    assert flat(torch.ones(1)).tolist() == [0.0]


def test_the_memory_layout_of_the_model_does_not_matter() -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Tanh(), torch.nn.Flatten())
    images = torch.randn(4, 3, 6, 6)
    vector = torch.randn(sum(p.numel() for p in net.parameters()))

    def product_in(layout: torch.memory_format) -> torch.Tensor:
        moved, seen = net.to(memory_format=layout), images.to(memory_format=layout)
        parameters = list(moved.parameters())
        return hessian_vector_product(lambda: moved(seen).square().mean(), parameters)(vector)

    plain, channels_last = map(product_in, (torch.contiguous_format, torch.channels_last))
    torch.testing.assert_close(channels_last, plain)


@pytest.mark.parametrize("bad", [torch.zeros(2), torch.tensor([math.nan, 1.0])])
def test_senseless_starts_are_refused(bad: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="start has norm"):
        power_iteration(diagonal(1.0, 2.0), bad)
    with pytest.raises(ValueError, match="at least 1"):
        lanczos(diagonal(1.0, 2.0), start(2), steps=0)
