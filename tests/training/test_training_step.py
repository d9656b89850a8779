"""A step on any layout is the same step: accumulation, uneven shares, unused and shared weights."""

from __future__ import annotations

import math

import pytest
import torch
from runs import Points, assert_same, linear_net, recipe, train
from torch import nn
from torch.nn import functional as F

from adaptive_platform.errors import DataError, RunFailedError, UserError


def reference_weights(steps: list[list[int]], data: Points, lr: float = 0.1) -> dict:
    """Plain PyTorch, one process: the mean loss over the listed samples of each step."""
    model = linear_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    for ids in steps:
        optimizer.zero_grad()
        F.cross_entropy(model(data.inputs[ids]), data.labels[ids]).backward()
        optimizer.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    ("world_size", "microbatch", "reducer"),
    [
        (1, 8, "ring"),
        (1, 3, "ring"),
        (2, 8, "ring"),
        (2, 2, "torus"),
        (3, 2, "ring"),
        (4, 1, "torus"),
    ],
)
def test_weights_follow_one_process_on_all_data(world_size, microbatch, reducer):
    data = Points(40)
    outcomes = train(
        recipe(f"microbatch={microbatch}", f"reducer.kind={reducer}"),
        world_size=world_size,
        data=data,
    )
    expected = reference_weights(outcomes[0].ids, data)
    for outcome in outcomes:
        assert_same(outcome.weights, expected, 2e-6)
        assert_same(outcome.weights, outcomes[0].weights, 0.0)


def test_samples_of_a_step_do_not_depend_on_the_layout():
    one = train(recipe(), world_size=1)[0]
    three = train(recipe("microbatch=2"), world_size=3)[0]
    assert [sorted(ids) for ids in one.ids] == [sorted(ids) for ids in three.ids]


def test_statistics_do_not_depend_on_who_runs_the_microbatches():
    """F02: 16 samples per step as 4 x 1 x 4, 2 x 2 x 4 and 1 x 4 x 4: ten steps agree."""
    data = Points(160)
    layout = {
        "batch": {"kind": "fixed", "global_batch": 16},
        "lr_rule": {"kind": "adascale", "base_batch": 4},
        "microbatch": 4,
        "stop": {"epochs": 1},
    }
    runs = [train(recipe(**layout), world_size=w, data=data)[0] for w in (1, 2, 4)]
    for run in runs:
        assert len(run.watcher.steps) >= 10
        assert run.watcher.steps[3].gain > 1.01, "no noise, no test"
    for run in runs[1:]:
        for one, other in zip(runs[0].watcher.steps, run.watcher.steps, strict=True):
            for name in ("grad_sqnorm", "noise_trace", "signal_sqnorm", "gain", "lr"):
                expected = pytest.approx(getattr(one, name), rel=1e-5)
                assert getattr(other, name) == expected, (one.step, name)
        assert_same(run.weights, runs[0].weights, 1e-5)


@pytest.mark.parametrize(("world_size", "size"), [(2, 13), (3, 13), (4, 5)])
def test_every_sample_once_per_epoch_when_nothing_divides(world_size, size):
    """F07."""
    outcome = train(
        recipe("batch.global_batch=4", "stop.epochs=2"), world_size=world_size, data=Points(size)
    )[0]
    for epoch in (0, 1):
        seen = [
            i
            for record, ids in zip(outcome.watcher.steps, outcome.ids, strict=True)
            if record.epoch == epoch
            for i in ids
        ]
        assert sorted(seen) == list(range(size))


class TwoHeads(nn.Module):
    """Uses one head per call; which one, the caller says."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(6, 8)
        self.heads = nn.ModuleList([nn.Linear(8, 3), nn.Linear(8, 3), nn.Linear(8, 3)])
        self.which = 0

    def forward(self, x):
        return self.heads[self.which](torch.tanh(self.body(x)))


@pytest.mark.parametrize("by_worker", [False, True])
def test_parameters_unused_in_a_step(by_worker):
    """F15: the third head is never used and never changes; the others do, alike on all workers."""

    def loss(run, outputs, targets):
        rank, step = run.reducer.rank, run.progress.step
        run.model.which = rank if by_worker else (step + 1) % 2
        return F.cross_entropy(outputs, targets, reduction="none")

    outcomes = train(
        recipe(
            "reducer.kind=torus",
            "stop.steps=6",
            "optimizer.weight_decay=0.1",
            lr_rule={"kind": "adascale"},
        ),
        world_size=2,
        model=TwoHeads,
        loss=loss,
    )
    assert_same(outcomes[0].weights, outcomes[1].weights, 0.0)
    start = TwoHeads().state_dict()
    for name, value in outcomes[0].weights.items():
        assert torch.equal(value, start[name]) == name.startswith("heads.2"), name


class Tied(nn.Module):
    """Embedding whose weight is also the output layer's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(5, 4)
        self.out = nn.Linear(4, 5, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, x):
        return self.out(self.embedding(x))


class Words(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.tensor(index % 5), (index + 1) % 5


@pytest.mark.parametrize("kind", ["sgd", "lars"])
def test_shared_parameters_count_once(kind, tmp_path):
    """F16."""
    config = recipe("stop.steps=5", f"optimizer.kind={kind}", "checkpoint.every=2 steps")
    alone = train(config, data=Words(), model=Tied)[0]
    both = train(config, data=Words(), model=Tied, world_size=2, run_dir=tmp_path)
    assert_same(both[0].weights, alone.weights, 1e-5)
    assert len(both[0].run._parts.buckets.parameters) == 1
    longer = recipe("stop.steps=7", f"optimizer.kind={kind}")
    resumed = train(longer, data=Words(), model=Tied, world_size=2, run_dir=tmp_path)
    model = resumed[0].run.model
    assert model.out.weight is model.embedding.weight
    assert resumed[0].run.progress.step == 7


def test_sparse_gradients_are_refused_by_name():
    """F17."""

    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(5, 4, sparse=True)

        def forward(self, x):
            return self.table(x)

    with pytest.raises(UserError, match=r"`table\.weight` has sparse gradients.*sparse=False"):
        train(recipe(), data=Words(), model=Sparse)


@pytest.mark.parametrize("size", [9, 5])
def test_batch_norm_never_sees_one_sample(size):
    """F25: what would be left over is merged into the step before."""

    def net():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))

    outcome = train(
        recipe("batch.global_batch=4", "stop.epochs=2"), world_size=2, data=Points(size), model=net
    )[0]
    assert [len(ids) for ids in outcome.ids] == ([4, 5] if size == 9 else [5]) * 2


def poison(at_step: int, rank: int, value: float = math.inf):
    def loss(run, outputs, targets):
        losses = F.cross_entropy(outputs, targets, reduction="none")
        hit = run.progress.step + run.progress.skipped_steps == at_step
        return losses * value if hit and run.reducer.rank == rank else losses

    return loss


def test_a_nonfinite_step_is_dropped_by_all_and_leaves_no_trace():
    """F03 without float16, F24: the rest equals a run whose data omits that step."""
    data = Points(160)
    config = recipe(
        "stop.epochs=1",
        lr_rule={"kind": "adascale", "base_batch": 4},
        batch={"kind": "noise_scale", "global_batch": 8, "max_batch": 8, "min_batch": 8},
    )
    outcomes = train(config, world_size=2, data=data, loss=poison(5, rank=1))
    outcome = outcomes[0]
    skipped = [r for r in outcome.watcher.steps if r.skipped]
    assert [r.step for r in skipped] == [6]
    assert outcome.run.progress.skipped_steps == 1
    assert_same(outcomes[0].weights, outcomes[1].weights, 0.0)
    assert all(math.isfinite(v.sum()) for v in outcome.weights.values())
    kept = [ids for r, ids in zip(outcome.watcher.steps, outcome.ids, strict=True) if not r.skipped]
    model = linear_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rates = [r.lr for r in outcome.watcher.steps if not r.skipped]
    for ids, rate in zip(kept, rates, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        F.cross_entropy(model(data.inputs[ids]), data.labels[ids]).backward()
        optimizer.step()
    assert_same(outcome.weights, dict(model.state_dict()), 1e-6)


def test_too_many_nonfinite_steps_name_the_parameter():
    """F24."""
    config = recipe("precision.max_skipped_in_a_row=3")

    def loss(run, outputs, targets):
        factor = math.inf if run.progress.step >= 2 else 1.0
        return F.cross_entropy(outputs, targets, reduction="none") * factor

    with pytest.raises(RunFailedError, match=r"3 steps in a row.*gradient of `0\.weight`"):
        train(config, world_size=2, loss=loss)


def test_batch_norm_buffers_stay_clean_when_a_step_is_dropped():
    def net():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))

    data = Points(40)
    data.inputs[7] = math.nan
    outcomes = train(recipe("stop.epochs=1"), world_size=2, data=data, model=net)
    assert sum(r.skipped for r in outcomes[0].watcher.steps) == 1
    for value in outcomes[0].weights.values():
        assert bool(torch.isfinite(value.double()).all())


def test_clipping_bounds_the_step_and_measuring_does_not():
    data = Points(40)
    free = train(recipe("stop.steps=1"), data=data)[0]
    clipped = train(recipe("stop.steps=1", "clip_norm=0.01"), data=data)[0]
    assert free.watcher.steps[0].grad_sqnorm == clipped.watcher.steps[0].grad_sqnorm
    start = linear_net().state_dict()
    moved = sum(float((clipped.weights[n] - start[n]).square().sum()) for n in start)
    assert math.sqrt(moved) == pytest.approx(0.1 * 0.01, rel=1e-4)


def test_reported_loss_is_the_mean_over_samples_at_any_number_of_workers():
    """F32."""

    def constant(run, outputs, targets):
        return outputs.sum(dim=1) * 0.0 + 1.25

    for world_size in (1, 2, 3):
        outcome = train(recipe("stop.steps=2"), world_size=world_size, loss=constant)[0]
        assert [r.loss for r in outcome.watcher.steps] == pytest.approx([1.25, 1.25])


def test_a_mean_instead_of_losses_per_sample_is_refused():
    with pytest.raises(UserError, match="one loss per sample"):
        train(recipe(), loss=lambda run, outputs, targets: F.cross_entropy(outputs, targets))


def test_one_worker_splits_its_batch_to_see_noise_and_holds_at_one_sample():
    """F01."""
    for batch in (8, 1):
        outcome = train(
            recipe(
                "stop.steps=30",
                batch={
                    "kind": "noise_scale",
                    "global_batch": batch,
                    "max_batch": batch,
                    "decide_every": "0.1 epochs",
                },
                lr_rule={"kind": "adascale"},
            ),
            data=Points(200),
        )[0]
        assert all(r.gain == 1.0 for r in outcome.watcher.steps)
        assert all(r.lr == pytest.approx(0.1) for r in outcome.watcher.steps)
        assert outcome.watcher.steps[-1].accumulation == min(batch, 2)
        # One sample can't be split: noise is told from consecutive gradients, and said so.
        assert outcome.watcher.steps[-1].biased == (batch == 1)
        assert outcome.watcher.steps[-1].noise_trace > 0


def test_batch_stays_within_small_data_and_says_so():
    """F04: 20 samples, noisy labels, upper limit above the data; then equal limits."""
    wild = {
        "kind": "noise_scale",
        "global_batch": 8,
        "max_batch": 128,
        "min_observations": 1,
        "decide_every": "0.1 epochs",
        "max_growth": 4.0,
    }
    outcome = train(
        recipe("stop.epochs=6", batch=wild, microbatch=2), world_size=2, data=Points(20)
    )[0]
    assert max(r.global_batch for r in outcome.watcher.steps) == 20
    assert {r.epoch for r in outcome.watcher.steps} == set(range(6))
    assert any("data size of 20 caps the batch" in d.reason for d in outcome.watcher.decisions)
    equal = wild | {"min_batch": 16, "max_batch": 16, "global_batch": 16}
    outcome = train(recipe("stop.epochs=4", batch=equal), world_size=2, data=Points(20))[0]
    assert {r.global_batch for r in outcome.watcher.steps} == {16, 4}


def test_first_batch_beyond_the_data_is_told():
    outcome = train(recipe("batch.global_batch=64", "stop.epochs=1"), data=Points(20))[0]
    assert [r.global_batch for r in outcome.watcher.steps] == [20]
    assert any("not 64" in e.text for e in outcome.watcher.events)


def test_overflow_halves_the_loss_scale_on_all_workers_and_nothing_else_moves():
    """F03 with dynamic loss scaling: float16, step 5 overflows on one worker."""
    data = Points(160)
    config = recipe(
        "stop.epochs=1",
        "precision.dtype=float16",
        "precision.loss_scale=1024",
        lr_rule={"kind": "adascale", "base_batch": 4},
    )
    outcomes = train(config, world_size=2, data=data, loss=poison(5, rank=1), keep_history=True)
    for outcome in outcomes:
        assert outcome.run.state.loss_scale.value == 512.0
        assert outcome.run.progress.skipped_steps == 1
        (dropped,) = [i for i, r in enumerate(outcomes[0].watcher.steps) if r.skipped]
        assert_same(outcome.history[dropped], outcome.history[dropped - 1], 0.0)
    assert_same(outcomes[0].weights, outcomes[1].weights, 0.0)
    plain = train(
        recipe("stop.epochs=1", lr_rule={"kind": "adascale", "base_batch": 4}),
        world_size=2,
        data=data,
        loss=poison(5, rank=1),
    )[0]
    assert_same(outcomes[0].weights, plain.weights, 2e-2)


@pytest.mark.parametrize("scale", [1.0, 256.0, 65536.0])
def test_statistics_undo_the_loss_scale(scale):
    """Jia et al.: nothing that is measured depends on a power of two in the loss."""
    data = Points(80)
    layout = {"lr_rule": {"kind": "adascale", "base_batch": 4}, "stop": {"steps": 5}}
    plain = train(recipe(**layout), world_size=2, data=data)[0]
    # A fixed scale without float16's rounding: same arithmetic, only the factor differs.
    scaled = train(recipe(**layout), world_size=2, data=data, loss_scale=scale)[0]
    for a, b in zip(plain.watcher.steps, scaled.watcher.steps, strict=True):
        assert b.grad_sqnorm == pytest.approx(a.grad_sqnorm, rel=1e-6)
        assert b.gain == pytest.approx(a.gain, rel=1e-6)
    assert_same(scaled.weights, plain.weights, 1e-7)


class WithAverages(nn.Module):
    """Batch norm, an average that the model re-assigns, a buffer without memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
        self.register_buffer("ema", torch.zeros(6))
        self.register_buffer("positions", torch.arange(6.0)[None].expand(4, 6))

    def forward(self, x):
        self.ema = 0.9 * self.ema + 0.1 * x.detach().mean(0)
        return self.net(x)


def test_reassigned_buffers_are_put_back_too():
    data = Points(40)
    data.inputs[7] = math.nan
    outcome = train(recipe("stop.epochs=1"), world_size=2, data=data, model=WithAverages)[0]
    assert sum(r.skipped for r in outcome.watcher.steps) == 1
    assert bool(torch.isfinite(outcome.weights["ema"]).all())


def test_batch_norm_averages_agree_on_all_workers_after_every_step():
    outcomes = train(recipe("stop.steps=3"), world_size=3, model=WithAverages, keep_history=True)
    for step in range(3):
        for outcome in outcomes[1:]:
            for name in ("net.1.running_mean", "net.1.running_var"):
                assert torch.equal(outcome.history[step][name], outcomes[0].history[step][name])


def test_losses_of_another_model_are_refused():
    other = linear_net()

    def elsewhere(run, outputs, targets):
        return F.cross_entropy(other(torch.ones(len(targets), 6)), targets, reduction="none")

    with pytest.raises(UserError, match="no parameter of the model has a gradient"):
        train(recipe(), loss=elsewhere)


def test_a_backward_pass_of_ones_own_is_refused():
    def twice(run, outputs, targets):
        losses = F.cross_entropy(outputs, targets, reduction="none")
        losses.mean().backward(retain_graph=True)
        return losses

    with pytest.raises(UserError, match=r"call run\.backward\(losses\) alone"):
        train(recipe(), loss=twice)


def test_gradients_in_two_parts_are_refused_and_not_lost():
    """Reentrant activation checkpointing of a layer used twice fires its hook twice."""
    from torch.utils.checkpoint import checkpoint

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.again = nn.Linear(6, 6), nn.Linear(6, 6)
            self.last = nn.Linear(6, 3)

        def forward(self, x):
            x = self.first(x)
            for _ in range(2):
                x = checkpoint(self.again, x, use_reentrant=True)
            return self.last(x)

    with pytest.raises(UserError, match=r"`again\.\w+` got its gradient in two parts"):
        train(recipe("reducer.bucket_mib=0.0001"), model=Twice)


def test_data_of_which_nothing_can_be_read_ends_the_run():
    class Gone(Points):
        def __getitem__(self, index):
            raise OSError("gone")

    config = recipe("data.max_broken_share=1", "stop.steps=5", "precision.max_skipped_in_a_row=3")
    with pytest.raises(DataError, match="no sample of 3 steps in a row could be read"):
        train(config, world_size=2, data=Gone(40))
    with pytest.raises(DataError, match="none of the 12 held-out samples could be read"):
        train(recipe("stop.steps=5"), world_size=2, eval_data=Gone(12))


def test_an_evaluation_loss_that_is_a_mean_is_refused():
    from adaptive_platform.training import scoring

    held_out = Points(20, seed=3)
    real = scoring.evaluate

    def with_mean(model, samples, config, loss, *args, **kwargs):
        return real(model, samples, config, lambda o, t: loss(o, t).mean(), *args, **kwargs)

    scoring.evaluate = with_mean
    try:
        with pytest.raises(UserError, match="one loss per sample"):
            train(recipe("stop.epochs=1"), world_size=2, eval_data=held_out)
    finally:
        scoring.evaluate = real


@pytest.mark.parametrize("kind", [torch.float64, torch.complex64])
def test_parameter_types_beyond_float32_are_refused_by_name(kind):
    with pytest.raises(UserError, match=r"`weight` is of type torch\.\w+; train in float32"):
        train(recipe(), model=lambda: nn.Linear(6, 3, dtype=kind))


def test_a_cap_on_the_rate_caps_what_a_step_counts_for():
    """Otherwise AdaScale's clock runs ahead of what was learned."""
    capped = {"kind": "adascale", "base_batch": 4, "max_factor": 1.0}
    outcome = train(recipe("stop.steps=8", "batch.global_batch=16", lr_rule=capped))[0]
    assert outcome.run.progress.step == 8
