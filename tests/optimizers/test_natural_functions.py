"""The pure parts of the natural gradient, by the worked examples of their papers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from adaptive_platform.optimizers.natural.assignment import Grid, gradient_workers, place
from adaptive_platform.optimizers.natural.blocks import UnitBlock
from adaptive_platform.optimizers.natural.coverage import Layer, cover
from adaptive_platform.optimizers.natural.damping import (
    damping_at_batch,
    split_damping,
    warmed_damping,
)
from adaptive_platform.optimizers.natural.factor_forms import similar
from adaptive_platform.optimizers.natural.factors import (
    input_products,
    input_rows,
    output_rows,
    unit_wise_sum,
)
from adaptive_platform.optimizers.natural.inverses import (
    cholesky_inverse,
    eigen_decomposition,
    kronecker_solve,
    newton_schulz_inverse,
    robust_inverse,
)
from adaptive_platform.optimizers.natural.packing import pack, packed_length, side_of, unpack
from adaptive_platform.optimizers.natural.refresh import (
    AdaptiveRefresh,
    Candidate,
    FixedRefresh,
    RefreshState,
    choose,
    next_interval,
)
from adaptive_platform.optimizers.natural.update_rules import kl_clip, momentum_at, rescale_weight

F64 = torch.float64


def spd(side: int, condition: float = 10.0, seed: int = 0, dtype=F64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    vectors, _ = torch.linalg.qr(torch.randn(side, side, generator=generator, dtype=F64))
    values = torch.logspace(0, -math.log10(condition), side, dtype=F64)
    return ((vectors * values) @ vectors.T).to(dtype)


# --- packing --------------------------------------------------------------------------------------


@given(st.integers(1, 30))
def test_packing_round_trips_exactly(side: int) -> None:
    matrix = spd(side)
    matrix = (matrix + matrix.T) / 2
    packed = pack(matrix)
    assert packed.numel() == packed_length(side) == side * (side + 1) // 2
    assert side_of(packed.numel()) == side
    assert torch.equal(unpack(packed), matrix)


def test_packing_goes_row_by_row() -> None:
    matrix = torch.arange(16.0).view(4, 4)
    packed = pack(matrix)
    for i in range(4):
        for j in range(i + 1):
            assert packed[i * (i + 1) // 2 + j] == matrix[i, j]
    with pytest.raises(ValueError, match="7 elements"):
        side_of(7)


# --- intervals ------------------------------------------------------------------------------------


def test_intervals_grow_like_fibonacci_while_nothing_changes() -> None:
    policy, state, intervals = AdaptiveRefresh(), RefreshState(), []
    for _ in range(10):
        after = policy.after(state, state.due, to_last=True, to_older=True, batch_ratio=1.0)
        intervals.append(after.due - state.due)
        state = after
    assert intervals == [1, 1, 2, 3, 5, 8, 13, 21, 34, 55]


def test_intervals_hold_and_halve() -> None:
    assert next_interval(3, 2, to_last=True, to_older=True) == 5
    assert next_interval(3, 2, to_last=True, to_older=False) == 3
    assert next_interval(3, 2, to_last=False, to_older=True) == 1
    assert next_interval(1, 1, to_last=False, to_older=False) == 1
    assert next_interval(9, 5, to_last=False, to_older=False) == 4


def test_similar_is_relative_and_nothing_is_similar_to_zero() -> None:
    one = torch.eye(3)
    assert similar(1.05 * one, one, 0.1)
    assert not similar(1.2 * one, one, 0.1)
    assert not similar(one * 0, one * 0, 0.1)


def test_a_running_average_of_a_constant_is_the_constant_and_starts_from_it() -> None:
    policy = FixedRefresh(1, 1, 0.95)
    value = None
    for count in range(30):
        value = policy.merge(value, torch.full((1,), 3.0), count, 1.0)
        torch.testing.assert_close(value, torch.full((1,), 3.0))
    other = policy.merge(value, torch.full((1,), 4.0), 100, 1.0)
    torch.testing.assert_close(other, torch.full((1,), 3.05))
    faster = policy.merge(value, torch.full((1,), 4.0), 100, 2.0)
    torch.testing.assert_close(faster, torch.full((1,), 3.0 + 1 - 0.95**2))


def test_fixed_intervals_are_shorter_for_larger_batches() -> None:
    policy = FixedRefresh(10, 100, 0.95)
    for ratio, steps in ((1.0, 10), (4.0, 2), (100.0, 1), (0.5, 20)):
        state = policy.after(RefreshState(7), 7, to_last=False, to_older=False, batch_ratio=ratio)
        assert state.due == 7 + steps


def test_a_step_takes_what_is_longest_overdue_while_it_has_credit() -> None:
    due = [
        Candidate(0, 5.0, False),
        Candidate(3, 5.0, False),
        Candidate(1, 5.0, False),
        Candidate(0, 100.0, True),
    ]
    assert choose(due[:3], 10.0) == [1, 2]
    assert choose(due[:3], 1.0) == [1]  # and goes into debt
    assert choose(due[:3], 0.0) == []
    assert choose(due, -7.0) == [3]
    assert choose(due, 5.0) == [1, 3]
    assert choose([], 1.0) == []


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=12), st.floats(0.5, 20))
def test_everything_gets_its_turn_and_work_per_step_is_what_was_allowed(
    costs: list[float], income: float
) -> None:
    last, credit, spent, steps = dict.fromkeys(range(len(costs)), 0), 0.0, 0.0, 400
    for step in range(1, steps + 1):
        credit = min(credit + income, income)
        taken = choose([Candidate(step - last[k], costs[k], False) for k in last], credit)
        for index in taken:
            last[index] = step
            credit -= costs[index]
            spent += costs[index]
    assert spent <= income * steps + max(costs)
    assert min(last.values()) > steps - 2 * (sum(costs) / income + len(costs) + 2)


# --- who works ------------------------------------------------------------------------------------


def test_the_grid_of_eight_workers_and_a_quarter() -> None:
    grid = Grid(8, gradient_workers(8, 0.25))
    assert [grid.column(rank) for rank in range(4)] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert {grid.row(rank) for rank in range(8)} == {(0, 1, 2, 3), (4, 5, 6, 7)}


@pytest.mark.parametrize(
    ("world", "fraction", "workers"),
    [(1, 0.0, 1), (8, 0.0, 1), (8, 1.0, 8), (8, 0.5, 4), (6, 0.5, 3), (7, 0.5, 1), (7, 1.0, 7)],
)
def test_any_number_of_workers_makes_a_grid(world: int, fraction: float, workers: int) -> None:
    assert gradient_workers(world, fraction) == workers


@given(st.lists(st.floats(1, 100), max_size=20), st.sampled_from([(1, 1), (4, 1), (4, 2), (6, 3)]))
def test_every_layer_has_an_owner_among_its_workers(costs, shape) -> None:
    grid = Grid(*shape)
    for placement in place(costs, grid):
        assert placement.owner in placement.workers
        assert placement.workers == grid.column(placement.owner)


def test_resnet50_speeds_up_by_462_percent_from_eight_workers_on() -> None:
    from torchvision.models import resnet50

    with torch.device("meta"):
        model = resnet50()
    costs, packed, blocks = [], 0, cover(model, norms=True).layers
    for layer in blocks:
        if layer.is_norm:
            continue
        a = layer.weight[0].numel() + (layer.bias is not None)
        g = layer.weight.shape[0]
        costs.append(float(a**3 + g**3))
        packed += packed_length(a) + packed_length(g)
    assert (len(blocks), len(costs), packed) == (107, 54, 76_967_027)
    assert sum(costs) == pytest.approx(4.53e11, rel=0.01)
    loads: dict[int, float] = dict.fromkeys(range(8), 0.0)
    for cost, placement in zip(costs, place(costs, Grid(8, 1)), strict=True):
        loads[placement.owner] += cost
    assert sum(costs) / max(loads.values()) == pytest.approx(4.62, abs=0.01)


# --- damping --------------------------------------------------------------------------------------


def test_damping_is_split_by_the_traces() -> None:
    a, g = torch.tensor([4.0, 2.0]), torch.tensor([0.5, 0.25, 0.75])
    to_a, to_g = split_damping(0.01, float(a.mean()), float(g.mean()))
    assert (to_a, to_g) == (pytest.approx(0.244949, abs=1e-6), pytest.approx(0.040825, abs=1e-6))
    assert to_a * to_g == pytest.approx(0.01)


@pytest.mark.parametrize("means", [(0.0, 1.0), (1.0, 0.0), (math.inf, 1.0), (1.0, math.inf)])
def test_a_dead_factor_gets_the_root(means) -> None:
    assert split_damping(0.04, *means) == (0.2, 0.2)


def test_damping_follows_the_batch_as_published() -> None:
    assert damping_at_batch(2e-4, 131_072, 32_768, 0.5) == pytest.approx(1e-4)
    assert damping_at_batch(2e-4, 64, 32, 0.0) == 2e-4


def test_damping_warms_down() -> None:
    values = [warmed_damping(0.01, 0.1, 10, step) for step in range(40)]
    assert values[0] == pytest.approx(0.1)
    assert values[1] == pytest.approx(0.8 * 0.1 + 0.2 * 0.01)
    assert values == sorted(values, reverse=True)
    assert values[-1] == pytest.approx(0.01, rel=0.01)
    assert warmed_damping(0.01, 0.1, 0, 0) == 0.01


# --- inverses -------------------------------------------------------------------------------------


def test_the_worked_example() -> None:
    a = torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=F64)
    g = torch.diag(torch.tensor([3.0, 1.0], dtype=F64))
    gradient = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=F64)
    expected = torch.tensor([[0.0, 1 / 3], [2 / 3, 5 / 3]], dtype=F64)
    for method in (cholesky_inverse, newton_schulz_inverse):
        solved = kronecker_solve(gradient, method(a, 0.0), method(g, 0.0), 0.0)
        torch.testing.assert_close(solved, expected, rtol=1e-5, atol=1e-6)
    solved = kronecker_solve(
        gradient, eigen_decomposition(a, 0.0), eigen_decomposition(g, 0.0), 0.0
    )
    torch.testing.assert_close(solved, expected)


def test_the_eigen_form_is_the_damped_dense_solve_and_the_factored_form_another() -> None:
    a, g = spd(3, seed=1), spd(2, seed=2)
    gradient = torch.randn(2, 3, dtype=F64, generator=torch.Generator().manual_seed(0))
    dense = torch.linalg.solve(torch.kron(g, a) + 0.1 * torch.eye(6), gradient.flatten())
    eigen = kronecker_solve(gradient, eigen_decomposition(a, 0.1), eigen_decomposition(g, 0.1), 0.1)
    torch.testing.assert_close(eigen.flatten(), dense)
    flat = torch.diag(torch.tensor([1.0, 0.01], dtype=F64))
    ones = torch.ones(2, 2, dtype=F64)
    pair = eigen_decomposition(flat, 0.01)
    multipliers = kronecker_solve(torch.eye(2, dtype=F64), pair, pair, 0.01).diagonal()
    torch.testing.assert_close(
        multipliers, torch.tensor([0.990, 99.0], dtype=F64), rtol=1e-3, atol=0
    )
    factored = kronecker_solve(ones, *[cholesky_inverse(flat, 0.01)] * 2, 0.01)
    torch.testing.assert_close(factored[1, 1], torch.tensor(2500.0, dtype=F64))


def test_scaling_a_up_and_g_down_changes_nothing() -> None:
    a, g = spd(3, seed=1), spd(2, seed=2)
    gradient = torch.randn(2, 3, dtype=F64, generator=torch.Generator().manual_seed(0))

    def solved(a, g):
        to_a, to_g = split_damping(0.1, float(a.diagonal().mean()), float(g.diagonal().mean()))
        return kronecker_solve(gradient, cholesky_inverse(a, to_a), cholesky_inverse(g, to_g), 0.1)

    torch.testing.assert_close(solved(7 * a, g / 7), solved(a, g))


@pytest.mark.parametrize("condition", [10.0, 1e3, 1e5])
def test_newton_schulz_inverts_and_a_warm_start_helps(condition: float) -> None:
    matrix = spd(64, condition)
    (inverse,) = newton_schulz_inverse(matrix, 0.0)
    torch.testing.assert_close(inverse @ matrix, torch.eye(64, dtype=F64), rtol=0, atol=1e-4)
    (again,) = newton_schulz_inverse(matrix, 0.0, start=inverse, iterations=2)
    assert again.isfinite().all()
    (too_few,) = newton_schulz_inverse(matrix, 0.0, iterations=2)
    assert too_few.isnan().all()


def test_newton_schulz_takes_the_published_number_of_rounds() -> None:
    for condition, rounds in ((10.0, 9), (1e3, 15), (1e5, 22)):
        matrix = spd(64, condition)
        assert newton_schulz_inverse(matrix, 0.0, iterations=rounds + 1)[0].isfinite().all()
        assert newton_schulz_inverse(matrix, 0.0, iterations=rounds - 2)[0].isnan().all()


@pytest.mark.parametrize("method", [cholesky_inverse, newton_schulz_inverse, eigen_decomposition])
def test_a_singular_factor_with_tiny_damping_is_inverted_all_the_same(method) -> None:
    matrix = torch.ones(40, 40)
    found = robust_inverse(matrix, 1e-8, method)
    assert found is not None
    assert all(each.isfinite().all() and each.dtype is torch.float32 for each in found)


def test_the_ladder_raises_the_damping_then_the_precision() -> None:
    tried = []

    def invert(matrix, damping):
        tried.append((matrix.dtype, round(damping, 9)))
        raise torch.linalg.LinAlgError("no")

    assert robust_inverse(torch.eye(2), 0.01, invert) is None
    wide, narrow = torch.float64, torch.float32
    assert tried == [(narrow, 0.01), (narrow, 0.1), (wide, 0.01), (wide, 0.1)]


def test_a_silent_wrong_answer_counts_as_a_failure() -> None:
    assert robust_inverse(torch.eye(3), 0.1, lambda m, d: (torch.full_like(m, torch.nan),)) is None
    assert robust_inverse(torch.eye(3), 0.1, lambda m, d: (3 * torch.eye(3).to(m),)) is None
    assert robust_inverse(torch.full((3, 3), torch.nan), 0.1, cholesky_inverse) is None


# --- factors --------------------------------------------------------------------------------------

CONVOLUTIONS = [
    nn.Conv2d(2, 3, 3, padding=1, bias=False),
    nn.Conv2d(2, 3, 3, padding=1),
    nn.Conv2d(2, 3, 3),
    nn.Conv2d(2, 3, 3, stride=2, padding=1, bias=False),
    nn.Conv2d(2, 3, (3, 5), padding=(1, 2), stride=(1, 2), bias=False),
    nn.Conv2d(2, 3, (3, 2), padding=(1, 0), dilation=(1, 3), bias=False),
    nn.Conv2d(2, 3, 1, bias=False),
    nn.Conv2d(2, 3, 1, stride=2, padding=1, bias=False),
    nn.Conv2d(2, 3, 7, stride=2, padding=3, bias=False),
    nn.Conv2d(2, 3, 3, dilation=2, padding="same"),
    nn.Conv2d(2, 3, (2, 3), padding="valid"),
    nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect", bias=False),
    nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"),
]
every_convolution = pytest.mark.parametrize("module", CONVOLUTIONS, ids=str)


@every_convolution
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_weight_gradient_is_output_rows_times_input_rows(module, layout) -> None:
    module = module.to(F64)
    inputs = torch.randn(4, 2, 7, 8, dtype=F64).contiguous(memory_format=layout)
    outputs = module(inputs)
    slopes = torch.randn(outputs.shape, dtype=F64).contiguous(memory_format=layout)
    module.zero_grad()
    outputs.backward(slopes)
    a, g = input_rows(module, inputs, F64), output_rows(module, slopes, F64)
    torch.testing.assert_close(g.T @ a, module.weight.grad.flatten(1))


@every_convolution
@pytest.mark.parametrize("size", [(7, 8), (3, 8)])
def test_products_of_inputs_are_those_of_the_rows(module, size) -> None:
    if size[0] < module.kernel_size[0]:
        size = module.kernel_size
    if module.dilation[0] == 2:
        size = (7, 8)
    inputs = torch.randn(4, 2, *size, dtype=F64)
    bias = module.bias is not None
    rows = input_rows(module, inputs, F64)
    if bias:
        rows = torch.cat([rows, torch.ones(len(rows), 1, dtype=F64)], 1)
    products = input_products(module, inputs, F64, bias=bias)
    torch.testing.assert_close(products, rows.T @ rows)


@pytest.mark.parametrize("height", [1, 2, 3])
def test_images_lower_than_the_kernel_have_the_right_products(height: int) -> None:
    module = nn.Conv2d(2, 3, 3, padding=1, bias=False)
    inputs = torch.randn(4, 2, height, 4, dtype=F64)
    rows = input_rows(module, inputs, F64)
    torch.testing.assert_close(input_products(module, inputs, F64, bias=False), rows.T @ rows)


def test_sequences_count_as_positions() -> None:
    module, inputs = nn.Linear(3, 2), torch.randn(4, 5, 3)
    assert input_rows(module, inputs, torch.float32).shape == (20, 3)
    assert output_rows(module, torch.randn(4, 5, 2), torch.float32).shape == (20, 2)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", [(6, 3), (6, 3, 4), (6, 3, 4, 2)])
def test_the_unit_wise_fisher_is_that_of_per_sample_gradients(training: bool, shape) -> None:
    norm = [nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d][len(shape) - 2](3).double()
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, 0.0, -2.0]))  # a zero scale must do no harm
        norm.running_mean.fill_(0.3)
    norm.train(training)
    inputs, slopes = torch.randn(shape, dtype=F64), torch.randn(shape, dtype=F64)
    expected = torch.zeros(3, 3, dtype=F64)
    for sample in range(6):
        mask = torch.zeros(shape, dtype=F64)
        mask[sample] = 1.0
        copy = type(norm)(3).double().train(training)
        copy.load_state_dict(norm.state_dict())
        (copy(inputs) * slopes * mask).sum().backward()
        gamma, beta = copy.weight.grad, copy.bias.grad
        expected += torch.stack([gamma**2, gamma * beta, beta**2])
    torch.testing.assert_close(unit_wise_sum(norm, inputs, slopes, F64), expected)


def test_a_batch_norm_block_is_solved_in_closed_form() -> None:
    norm = nn.BatchNorm2d(1)
    block = UnitBlock(Layer("norm", (norm,), norm.weight, norm.bias))
    block.fisher.value = torch.tensor([[0.04], [0.01], [0.09]])
    scale, shift = block.solve(torch.tensor([0.2]), torch.tensor([0.3]), 0.01)
    assert float(scale) == pytest.approx(3.469388, abs=1e-5)
    assert float(shift) == pytest.approx(2.653061, abs=1e-5)
    block.fisher.value = torch.full((3, 1), torch.inf)
    assert float(block.solve(torch.tensor([0.2]), torch.tensor([0.3]), 0.01)[0]) == pytest.approx(
        0.2
    )


# --- after preconditioning ------------------------------------------------------------------------


def test_weights_are_shrunk_and_never_grown() -> None:
    weight = torch.ones(4, 3)
    rescale_weight(weight)
    torch.testing.assert_close(weight, torch.full((4, 3), 0.816497), rtol=1e-5, atol=0)
    small = torch.full((4, 3), 0.1)
    rescale_weight(small)
    torch.testing.assert_close(small, torch.full((4, 3), 0.1))


def test_the_kl_clip_only_ever_shrinks() -> None:
    steps, grads = [torch.tensor([5.0, 5.0])], [torch.tensor([5.0, 5.0])]
    assert float(kl_clip(steps, grads, 0.1, 1e-3)) == pytest.approx(0.044721, abs=1e-6)
    assert float(kl_clip(steps, grads, 0.1, 1e3)) == 1.0
    assert float(kl_clip([torch.zeros(2)], grads, 0.1, 1e-3)) == 1.0


def test_momentum_rules() -> None:
    assert momentum_at("constant", 0.9, 0.1, 1.0, 0.2) == 0.9
    assert momentum_at("ratio", 0.9, 0.1, 1.0, None) == pytest.approx(0.09)
    assert momentum_at("ratio", 0.9, 2.0, 1.0, None) == 0.9
    assert momentum_at("correction", 0.9, 0.1, 1.0, 0.2) == pytest.approx(0.45)
    assert momentum_at("correction", 0.9, 0.3, 1.0, 0.2) == 0.9
    assert momentum_at("correction", 0.9, 0.3, 1.0, None) == 0.9
