"""Fresh gradients: when they leave their parameters, and what squares of absent ones come to."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_gradients_buckets import Alone
from torch import nn

from adaptive_platform.gradients import intake
from adaptive_platform.gradients.buckets import GradientBuckets
from adaptive_platform.gradients.layout import Piece, portions_of


class Whole:
    """Halves among one worker, who owns everything."""

    def shard(self, length):
        return 0, length

    def start(self, buffer, visit):
        visit(buffer)
        return Alone()

    def narrow(self, part):
        pass

    def scatter(self, buffer, *, exact=False):
        return Alone()

    gather = scatter


class Branches(nn.Module):
    """Two layers of which one may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(3, 2)
        self.sometimes = nn.Linear(3, 2)

    def forward(self, inputs: torch.Tensor, both: bool) -> torch.Tensor:
        found = self.always(inputs)
        return found + self.sometimes(inputs) if both else found


def test_gradients_leave_their_parameters_long_before_a_bucket_is_full(monkeypatch):
    """Held until then, they would be read from memory again and need as much of it once more."""
    monkeypatch.setattr(intake, "_CACHED_BYTES", 64 * 64 * 4)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
    buckets = GradientBuckets(
        model.named_parameters(), Alone(), bucket_bytes=10**9, rider_slots=1, layers=True
    )
    held = []
    # Runs in the middle of backward, when three layers have their gradients.
    inputs = torch.randn(2, 64)
    middle = model[:3](inputs)
    middle.register_hook(lambda _: held.append(sum(p.grad is not None for p in model.parameters())))
    buckets.begin_step(measure=True)
    buckets.begin_microbatch(last=True)
    model[3:](middle).square().sum().backward()
    measured = buckets.end_microbatch()
    assert held[0] <= 2
    buckets.finish()
    layers = [float(p.grad.square().sum()) for p in model.parameters()]
    assert buckets.in_model_order(buckets.layer_sqnorms.tolist()) == pytest.approx(layers, rel=1e-5)
    assert float(measured) == pytest.approx(sum(layers), rel=1e-5)


@pytest.mark.parametrize("turns", [(True, False), (False, True), (False, False)])
def test_squares_of_what_was_not_used_are_zero(turns):
    """Also where the step before has left others in their place."""
    model = Branches()
    buckets = GradientBuckets(
        model.named_parameters(), Alone(), bucket_bytes=10**9, rider_slots=1, halves=Whole()
    )
    assert buckets.shards is not None
    inputs = torch.randn(4, 3)
    for step in ((True, True), turns):
        buckets.begin_step(measure=True, squares=True)
        expected = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        for number, both in enumerate(step):
            buckets.begin_microbatch(last=number == 1, square_weight=3.0)
            loss = model(inputs + number, both).square().sum()
            used = model.named_parameters() if both else model.always.named_parameters("always")
            pairs = dict(used)
            for name, gradient in zip(
                pairs, torch.autograd.grad(loss, list(pairs.values())), strict=True
            ):
                expected[name] += 3.0 * gradient.square()
            model(inputs + number, both).square().sum().backward()
            buckets.end_microbatch()
        buckets.finish()
        buckets.release()
        [shard] = buckets.shards.all
        flat = torch.cat([expected[name].flatten() for name in shard.bucket.names])
        torch.testing.assert_close(shard.squares, flat)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(1, 60))
def test_portions_cover_a_part_once_and_in_order(lengths, longest):
    pieces, offset = [], 0
    for index, length in enumerate(lengths):
        pieces.append(Piece(index, offset, 7, length))
        offset += length
    seen = []
    for portion in portions_of(pieces, longest):
        assert 0 < portion.stop - portion.start <= longest
        inside = portion.start
        for piece in portion.pieces:
            assert portion.start + piece.offset == inside
            seen += [(piece.index, piece.start + n) for n in range(piece.length)]
            inside += piece.length
        assert inside == portion.stop
    assert seen == [(index, 7 + n) for index, length in enumerate(lengths) for n in range(length)]


def test_an_empty_part_has_no_portions():
    assert portions_of([], 5) == []
