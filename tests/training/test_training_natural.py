"""Optimizers that listen to the model, driven by the loop: layouts, skips, resumes, other sizes."""

from __future__ import annotations

import math

import pytest
import torch
from runs import Points, assert_same, recipe, train
from torch import nn
from torch.nn import functional as F

from adaptive_platform.errors import UserError
from adaptive_platform.optimizers import OptimizerConfig
from adaptive_platform.settings import variants_of

LISTENING = sorted(k for k, c in variants_of(OptimizerConfig).items() if c.needs_model)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def config(kind: str, *words: str):
    return recipe(
        "batch.global_batch=8",
        *words,
        optimizer={"kind": kind, "lr": 0.01},
    )


def test_there_are_some():
    assert {"kfac", "sp_ngd"} <= set(LISTENING)


@pytest.mark.parametrize("kind", LISTENING)
def test_workers_agree_bit_for_bit_and_weights_move(kind):
    outcomes = train(config(kind, "stop.steps=6"), world_size=3, model=net)
    for outcome in outcomes[1:]:
        assert_same(outcome.weights, outcomes[0].weights, 0.0)
    start = net().state_dict()
    for name, value in outcomes[0].weights.items():
        assert bool(torch.isfinite(value).all())
        assert not torch.equal(value, start[name])


@pytest.mark.parametrize("kind", ["kfac", "sp_ngd"])
@pytest.mark.parametrize("words", [(), ("microbatch=2",)])
def test_preconditioning_does_not_depend_on_the_layout(kind, words):
    """Rule 1: one worker, three workers, micro-batches of two: the same step to rounding."""
    one = train(config(kind, "stop.steps=5"), model=net)[0]
    many = train(config(kind, "stop.steps=5", *words), world_size=3, model=net)[0]
    assert_same(many.weights, one.weights, 1e-4)


@pytest.mark.parametrize("kind", LISTENING)
def test_a_resumed_run_goes_on_bit_for_bit(kind, tmp_path):
    """F23: factors, inverses and intervals are in the checkpoint."""
    data = Points(60)
    settings = {"world_size": 2, "data": data, "model": net}
    whole = train(config(kind, "stop.steps=12"), **settings)[0]
    train(config(kind, "stop.steps=12"), **settings, run_dir=tmp_path, stop_after=7)
    second = train(config(kind, "stop.steps=12"), **settings, run_dir=tmp_path)[0]
    assert_same(second.weights, whole.weights, 0.0)


@pytest.mark.parametrize("kind", ["kfac", "sp_ngd"])
def test_another_number_of_workers_goes_on(kind, tmp_path):
    data = Points(60)
    whole = train(config(kind, "stop.steps=12"), data=data, model=net)[0]
    train(
        config(kind, "stop.steps=12"),
        data=data,
        model=net,
        world_size=2,
        run_dir=tmp_path,
        stop_after=7,
    )
    second = train(
        config(kind, "stop.steps=12"), data=data, model=net, world_size=3, run_dir=tmp_path
    )[0]
    assert_same(second.weights, whole.weights, 1e-3)


@pytest.mark.parametrize("kind", LISTENING)
def test_a_dropped_step_enters_no_factor(kind):
    """F11 (b): one worker's loss is infinite once; everything stays finite, training goes on."""

    def poisoned(run, outputs, targets):
        losses = F.cross_entropy(outputs, targets, reduction="none")
        hit = run.progress.step == 3 and not run.progress.skipped_steps and run.reducer.rank == 1
        return losses * math.inf if hit else losses

    outcomes = train(config(kind, "stop.steps=8"), world_size=2, model=net, loss=poisoned)
    assert outcomes[0].run.progress.skipped_steps == 1
    assert_same(outcomes[0].weights, outcomes[1].weights, 0.0)
    for value in outcomes[0].weights.values():
        assert bool(torch.isfinite(value).all())


def test_covered_and_uncovered_layers_are_told():
    """F12."""
    outcome = train(config("sp_ngd", "stop.steps=1"), model=net)[0]
    told = " ".join(e.text for e in outcome.watcher.events)
    assert "natural gradient: 2 layers: 0, 2" in told


def test_reduced_gradients_and_own_curvature_do_not_go_together():
    with pytest.raises(UserError, match=r"vr: optimizer\.kind = sp_ngd preconditions"):
        recipe(optimizer={"kind": "sp_ngd"}, vr={})
