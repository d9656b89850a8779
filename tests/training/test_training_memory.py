"""Micro-batches that do not fit: halved together, the same samples again, remembered."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from runs import Points, assert_same, recipe, train
from torch import nn
from torch.nn import functional as F

from adaptive_platform.data import MicroBatch, dealt, microbatch_sizes
from adaptive_platform.errors import RunFailedError
from adaptive_platform.training.memory import halved, recut


class Cramped(nn.Module):
    """Memory for `fits` samples in a pass; where it runs out, forward or backward."""

    def __init__(
        self, fits: int, where: str = "forward", norm: bool = False, drop: float = 0.0
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        middle = nn.BatchNorm1d(10) if norm else nn.Tanh()
        self.net = nn.Sequential(nn.Linear(6, 10), middle, nn.Dropout(drop), nn.Linear(10, 3))
        self.fits = fits
        self.where = where

    def forward(self, x):
        too_many = self.training and len(x) > self.fits
        if too_many and self.where == "forward":
            raise torch.OutOfMemoryError("CUDA out of memory. (a test)")
        out = self.net(x)
        if too_many:

            def fail(gradient):
                raise torch.OutOfMemoryError("CUDA out of memory. (a test)")

            self.net[0](x).sum()  # a part of the graph that is never used
            hidden = self.net[1](self.net[0](x))
            hidden.register_hook(fail)
            out = out + 0.0 * self.net[3](hidden)
        return out


def outcome_of(model, config, world_size=2, **how):
    return train(config, world_size=world_size, data=Points(60), model=model, **how)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_run_is_that_of_the_smaller_microbatch(where, world_size):
    """Bit for bit: same samples, same batch, dropout and batch norm included."""
    config = recipe("batch.global_batch=18", "stop.epochs=2", lr_rule={"kind": "adascale"})
    # Workers are threads here and share one generator, so only a single one can draw.
    drop = 0.3 if world_size == 1 else 0.0
    cramped = outcome_of(lambda: Cramped(3, where, True, drop), config, world_size)
    small = recipe("batch.global_batch=18", "stop.epochs=2", "microbatch=3",
                   lr_rule={"kind": "adascale"})  # fmt: skip
    ample = outcome_of(lambda: Cramped(99, where, True, drop), small, world_size)
    assert cramped[0].run.state.memory_limit == 3
    assert cramped[0].ids == ample[0].ids
    assert [r.global_batch for r in cramped[0].watcher.steps] == [
        r.global_batch for r in ample[0].watcher.steps
    ]
    for one, other in zip(cramped, ample, strict=True):
        assert_same(one.weights, other.weights, 0.0)
    told = [e.text for e in cramped[0].watcher.events if e.kind == "memory"]
    assert all("the global batch stays" in text for text in told)
    assert len(told) == {1: 2, 2: 2, 3: 1}[world_size]


class Narrow(nn.Module):
    """Memory for `fits` samples in any pass, also one that scores or measures."""

    def __init__(self, fits: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Tanh(), nn.Linear(10, 3))
        self.fits = fits

    def forward(self, x):
        if len(x) > self.fits:
            raise torch.OutOfMemoryError("CUDA out of memory. (a test)")
        return self.net(x)


@pytest.mark.parametrize("words", [("microbatch=3",), ()], ids=["set", "found"])
@pytest.mark.parametrize("evaluation", ["running_average", "recomputed"])
def test_evaluations_and_curvature_keep_to_the_microbatch_of_training(words, evaluation):
    """Found on the way from 9 by halving, 3 again; recomputed averages rest on such passes."""
    batch = {"kind": "abs", "global_batch": 18}
    model = {"normalization": {"kind": "local", "evaluation": evaluation}}
    config = recipe("stop.epochs=1", *words, batch=batch, model=model)
    held_out = Points(31, seed=1)
    outcome = outcome_of(lambda: Narrow(3), config, eval_data=held_out)[0]
    assert outcome.run.state.hessian
    whole = Narrow(31)
    whole.load_state_dict(outcome.weights)
    (score,) = outcome.watcher.evaluations
    scores = whole.eval()(held_out.inputs).detach()
    assert score.samples == 31
    assert score.accuracy == pytest.approx(
        float((scores.argmax(1) == held_out.labels).float().mean())
    )
    assert score.loss == pytest.approx(float(F.cross_entropy(scores, held_out.labels)), rel=1e-5)


def test_one_worker_alone_makes_all_of_them_halve():
    models = iter([Cramped(99), Cramped(4)])
    outcomes = train(
        recipe("batch.global_batch=16", "stop.steps=4"),
        world_size=2,
        data=Points(64),
        model=lambda: next(models),
    )
    assert [o.run.state.memory_limit for o in outcomes] == [4, 4]
    assert_same(outcomes[0].weights, outcomes[1].weights, 0.0)
    assert outcomes[0].watcher.steps[0].accumulation == 2
    assert "on 1 worker(s)" in next(
        e.text for e in outcomes[0].watcher.events if e.kind == "memory"
    )


def test_the_smaller_microbatch_is_in_the_checkpoint(tmp_path):
    config = recipe("batch.global_batch=24", "stop.steps=4")
    first = outcome_of(lambda: Cramped(4), config, run_dir=tmp_path, stop_after=2)[0]
    second = outcome_of(lambda: Cramped(4), config, run_dir=tmp_path)[0]
    assert first.run.state.memory_limit == second.run.state.memory_limit == 3
    assert not [e for e in second.watcher.events if e.kind == "memory"]
    assert second.watcher.steps[0].microbatch == 3


def test_where_nothing_smaller_is_left_the_way_out_is_named():
    with pytest.raises(RunFailedError, match=r"one sample does not fit.*precision\.dtype=bfloat16"):
        outcome_of(lambda: Cramped(0), recipe())
    with pytest.raises(RunFailedError, match="even 2 samples do not fit"):
        outcome_of(lambda: Cramped(1, norm=True), recipe())


def test_other_errors_pass_through():
    class Faulty(nn.Linear):
        def forward(self, x):
            raise RuntimeError("not about memory")

    with pytest.raises(RuntimeError, match="not about memory"):
        train(recipe(), model=lambda: Faulty(6, 3))


@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 3), st.integers(1, 2))
def test_recut_equals_a_cut_with_the_smaller_size(share, largest, minimum, at_least):
    if share < minimum:
        return
    whole = MicroBatch(
        inputs=torch.arange(share * 2).view(share, 2),
        targets=torch.arange(share),
        ids=torch.arange(share),
    )
    first = recut([whole], max(largest, minimum), minimum, at_least)
    smaller = halved(max(largest, 2 * minimum), minimum)
    again = recut(first, smaller, minimum, at_least)
    assert [len(m) for m in again] == list(microbatch_sizes(share, smaller, minimum, at_least))
    # As if the share had been dealt to the smaller micro-batches at once.
    expected = torch.from_numpy(dealt(share, len(again)))
    assert torch.equal(torch.cat([m.ids for m in again]), expected)
    assert torch.equal(torch.cat([m.inputs for m in again]), whole.inputs[expected])
