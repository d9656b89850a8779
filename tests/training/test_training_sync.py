"""Whole runs whose workers' copies differ: local SGD, elastic averaging, gossip."""

from __future__ import annotations

import pytest
import torch
from runs import Points, assert_same, linear_net, recipe, train

from adaptive_platform.errors import UserError

MOMENTUM = {
    "kind": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01
}  # fmt: skip
KINDS = [
    {"kind": "local_sgd", "period": 4, "start": "6 steps"},
    {"kind": "local_sgd", "period": 3, "block_rounds": 2},
    {"kind": "easgd", "period": 2},
    {"kind": "gossip"},
    {"kind": "gossip", "direction": "push", "period": 2},
]


def of(sync, *overrides, **content):
    return recipe("stop.epochs=4", *overrides, sync=sync, optimizer=MOMENTUM, **content)


def test_one_local_step_is_synchronous_sgd():
    """H = 1 with private Nesterov momentum and weight decay equals summed gradients; H = 2 not."""
    ordinary = train(of({"kind": "every_step"}), world_size=4, data=Points(64))[0]
    for period, tolerance in ((1, 1e-5), (2, None)):
        local = train(of({"kind": "local_sgd", "period": period}), world_size=4, data=Points(64))[0]
        assert local.ids == ordinary.ids
        assert local.lrs == ordinary.lrs
        if tolerance:
            assert_same(local.weights, ordinary.weights, tolerance)
        else:
            with pytest.raises(AssertionError):
                assert_same(local.weights, ordinary.weights, 1e-3)


@pytest.mark.parametrize("sync", KINDS, ids=lambda s: "-".join(map(str, s.values())))
def test_everyone_ends_with_the_same_weights_and_data_counts_once(sync):
    outcomes = train(of(sync, "batch.global_batch=7"), world_size=3, data=Points(50))
    for outcome in outcomes[1:]:
        assert_same(outcome.weights, outcomes[0].weights, 0.0)
    first = [i for r, ids in zip(outcomes[0].watcher.steps, outcomes[0].ids, strict=True)
             if r.epoch == 0 for i in ids]  # fmt: skip
    assert sorted(first) == list(range(50))
    assert all(torch.isfinite(w).all() for w in outcomes[0].weights.values())


@pytest.mark.parametrize("sync", KINDS, ids=lambda s: "-".join(map(str, s.values())))
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, sync):
    """F23: post-local SGD with warm-up 6 and period 4 among them, stopped at step 8."""
    config, data = of(sync), Points(32)
    whole = train(config, world_size=2, data=data)
    first = train(config, world_size=2, data=data, run_dir=tmp_path, stop_after=8)
    assert first[0].run.progress.step == 8
    second = train(config, world_size=2, data=data, run_dir=tmp_path, must_resume=True)
    for one, other in zip(whole, second, strict=True):
        assert_same(other.weights, one.weights, 0.0)
    told = [r.loss for r in (*first[0].watcher.steps, *second[0].watcher.steps)]
    assert told == [r.loss for r in whole[0].watcher.steps]


def test_another_number_of_workers_goes_on_from_the_agreed_weights(tmp_path):
    config, data = of({"kind": "local_sgd", "period": 4}), Points(32)
    train(config, world_size=2, data=data, run_dir=tmp_path, stop_after=6)
    outcome = train(config, world_size=3, data=data, run_dir=tmp_path)[0]
    assert outcome.run.progress.step == 16
    assert any("agreed weights" in e.text for e in outcome.watcher.events)


def test_scoring_changes_nothing_and_scores_the_agreed_weights():
    sync = {"kind": "local_sgd", "period": 5}
    plain = train(of(sync), world_size=2, data=Points(32))
    scored = train(
        of(sync, "report.evaluate_every=3 steps"), world_size=2, data=Points(32),
        eval_data=Points(20, seed=1),
    )  # fmt: skip
    assert len(scored[0].watcher.evaluations) > 3
    assert_same(scored[0].weights, plain[0].weights, 0.0)


def test_only_averages_travel():
    """From the switch on, weights are sent every H steps, and a few numbers in each step."""

    def sent(sync):
        config = of(sync, "checkpoint.every=100 epochs")
        outcome = train(config, world_size=2, data=Points(64), model=wide)[0]
        return outcome.run.reducer.bytes_sent, outcome.run.progress.step

    ordinary, steps = sent({"kind": "every_step"})
    local, _ = sent({"kind": "local_sgd", "period": 8})
    assert steps == 32
    weights = sum(p.numel() for p in wide().parameters()) * 4
    assert ordinary > steps * weights
    assert local < (steps // 8 + 2) * weights * 1.1


def wide():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 2000), torch.nn.ReLU(), torch.nn.Linear(2000, 3))


def test_a_step_that_is_not_finite_on_one_worker_is_dropped_by_all():
    def loss(run, outputs, targets):
        losses = torch.nn.functional.cross_entropy(outputs, targets, reduction="none")
        return losses * float("inf") if run.progress.step == 5 and run.reducer.rank == 1 else losses

    config = of({"kind": "local_sgd", "period": 3}, "stop.epochs=1")
    outcomes = train(config, world_size=2, data=Points(64), loss=_once(loss))
    for outcome in outcomes:
        assert outcome.run.progress.skipped_steps == 1
        assert all(torch.isfinite(w).all() for w in outcome.weights.values())
    assert sum(r.skipped for r in outcomes[0].watcher.steps) == 1


def _once(loss):
    """Only at the first try of step 5: the next slice has the same number of committed steps."""
    done = set()

    def call(run, outputs, targets):
        fresh = run.progress.cursor not in done and not done
        if run.progress.step == 5 and run.reducer.rank == 1 and fresh:
            done.add(run.progress.cursor)
            return loss(run, outputs, targets)
        return torch.nn.functional.cross_entropy(outputs, targets, reduction="none")

    return call


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"optimizer": {"kind": "sp_ngd", "lr": 0.1}}, "optimizer.kind = sp_ngd"),
        ({"vr": {}}, "so vr has no variance"),
        ({"batch": {"kind": "noise_scale", "global_batch": 8}}, "batch.kind = noise_scale"),
        ({"lr_rule": {"kind": "adascale"}}, "lr_rule.kind = adascale with clock = scale_invariant"),
        ({"lr_rule": {"kind": "adascale", "clock": "samples"}}, "lr_rule.kind = adascale"),
        (
            {"lr_rule": {"kind": "linear", "clock": "scale_invariant"}},
            "gain that lr_rule.kind = linear with clock = scale_invariant.*clock = samples",
        ),
    ],
)
@pytest.mark.parametrize("kind", ["gossip", "easgd", "local_sgd"])
def test_what_does_not_go_with_it_is_refused(change, told, kind):
    with pytest.raises(UserError, match=told):
        recipe(sync={"kind": kind}, **change)


@pytest.mark.parametrize("rule", [{"kind": "adascale"}, {"kind": "sqrt"}])
def test_a_gain_may_be_measured_before_the_local_phase(rule):
    clock = {"clock": "scale_invariant"}
    recipe(sync={"kind": "local_sgd", "start": "2 epochs"}, lr_rule=rule | clock)


def test_noise_may_be_measured_before_the_local_phase():
    config = of(
        {"kind": "local_sgd", "start": "2 epochs"},
        batch={"kind": "noise_scale", "global_batch": 8, "max_batch": 16, "min_observations": 2},
    )
    outcome = train(config, world_size=2, data=Points(64))[0]
    early = [r.noise_trace for r in outcome.watcher.steps if r.epoch < 2]
    late = [r.noise_trace for r in outcome.watcher.steps if r.epoch >= 2]
    assert early[-1] is not None
    assert set(late) == {early[-1]}


def test_hierarchical_averages_stay_on_the_node_until_the_last_round():
    """linear_net's copies on one node agree after H steps; those of two nodes after H * H_b."""
    config = of({"kind": "local_sgd", "period": 1, "block_rounds": 4}, "stop.epochs=1")
    outcomes = train(config, world_size=4, data=Points(64), model=linear_net, keep_history=True,
                     nodes=("a", "a", "b", "b"))  # fmt: skip
    for step in range(7):
        same_node = _equal(outcomes[0].history[step], outcomes[1].history[step])
        other_node = _equal(outcomes[0].history[step], outcomes[2].history[step])
        assert same_node
        assert other_node == ((step + 1) % 4 == 0)


def _equal(left, right):
    return all(torch.equal(left[name], right[name]) for name in left)


def test_a_worker_without_samples_has_done_with_its_step():
    """What the others' samples moved stays, whatever happens before the next step."""

    def net():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 3))

    config = recipe("stop.steps=2", "batch.global_batch=4", sync={"kind": "local_sgd"})
    outcomes = train(config, world_size=2, data=Points(6), model=net)
    counts = [len(ids) for ids in outcomes[0].watcher.steps[1].sample_ids]
    assert sorted(counts) == [0, 2]
    idle = outcomes[counts.index(0)]
    idle.run._parts.step.give_up()
    now = idle.run.model.state_dict()["0.running_mean"]
    torch.testing.assert_close(now, idle.weights["0.running_mean"])
