"""Noise through Adam's preconditioner: as published, whoever runs the micro-batches, resumable."""

from __future__ import annotations

import math
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from runs import Points, assert_same, linear_net, recipe, train
from torch.nn import functional as F

ADAM = {
    "optimizer": {"kind": "adamw", "lr": 0.01, "weight_decay": 0.0},
    "lr_rule": {"kind": "adascale", "base_batch": 4},
    "batch": {"kind": "fixed", "global_batch": 16},
    "microbatch": 4,
    "statistics": {"every": 1},
}


def moments_step_by_step(steps, data, build):
    """|P g|^2 of micro-batches and of their mean at each step, in plain PyTorch and float64."""
    model = linear_net()
    parameters = list(model.parameters())
    optimizer = build(parameters)
    for number, (record, sets) in enumerate(steps):
        optimizer.param_groups[0]["lr"] = record.lr
        scales = [torch.ones_like(p) for p in parameters]
        if number >= 5:
            scales = []
            for p in parameters:
                state = optimizer.state[p]
                corrected = state["exp_avg_sq"] / (1 - 0.999 ** int(state["step"]))
                scales.append(1 / (corrected.sqrt() + 1e-8))
        micro = []
        for ids in sets:
            loss = F.cross_entropy(model(data.inputs[ids]), data.labels[ids])
            gradients = torch.autograd.grad(loss, parameters)
            micro.append(torch.cat([g.flatten() for g in gradients]).double())
        whole = torch.stack(micro).mean(0)
        scale = torch.cat([s.flatten() for s in scales]).double()
        each = sum(float((scale * g).square().sum()) for g in micro) / len(micro)
        yield record, each, float((scale * whole).square().sum()), float(whole.square().sum())
        offset = 0
        for p in parameters:
            p.grad = whole[offset : offset + p.numel()].view_as(p).float()
            offset += p.numel()
        optimizer.step()


def test_the_estimates_are_those_of_the_published_formula():
    data = Points(160)
    # Forgets all but the step's own.
    config = ADAM | {"statistics": {"every": 1, "half_life_samples": 1}}
    outcome = train(recipe("stop.epochs=1", **config), world_size=4, data=data)[0]
    # Four workers with one micro-batch each, so the ids of a worker are a micro-batch.
    steps = [(r, r.sample_ids) for r in outcome.watcher.steps]
    assert len(steps) > 7
    for record, each, whole, plain in moments_step_by_step(
        steps, data, lambda p: torch.optim.AdamW(p, weight_decay=0.0)
    ):
        assert record.preconditioned == (record.step > 5)
        assert record.grad_sqnorm == pytest.approx(plain, rel=1e-3)
        noise = (each - whole) / (1 / 4 - 1 / 16)
        assert record.noise_trace == pytest.approx(noise, rel=5e-3), record.step
        assert record.signal_sqnorm == pytest.approx(whole - noise / 16, rel=5e-3, abs=1e-4)
        summary_gain = (noise / 4 + max(whole - noise / 16, 0)) / (
            noise / 16 + max(whole - noise / 16, 0)
        )
        assert record.gain == pytest.approx(summary_gain, rel=5e-3)
        assert record.lr == pytest.approx(0.01 * math.sqrt(record.gain))


def test_averages_start_anew_when_the_preconditioner_sets_in():
    outcome = train(recipe("stop.epochs=1", **ADAM), world_size=2, data=Points(160))[0]
    steps = outcome.watcher.steps
    assert [r.preconditioned for r in steps] == [False] * 5 + [True] * (len(steps) - 5)
    # g is far smaller than g / sqrt(v): one average of both would show it for a long time.
    assert steps[5].noise_trace > 10 * steps[4].noise_trace
    assert outcome.run.state.estimator.summary().observations == len(steps) - 5


@pytest.mark.parametrize("kind", ["adamw", "lamb"])
def test_it_does_not_matter_who_runs_the_microbatches(kind):
    data = Points(160)
    config = ADAM | {"optimizer": {"kind": kind, "lr": 0.01}, "stop": {"epochs": 1}}
    runs = [train(recipe(**config), world_size=w, data=data)[0] for w in (1, 2, 4)]
    assert runs[0].watcher.steps[-1].preconditioned
    for run in runs[1:]:
        for one, other in zip(runs[0].watcher.steps, run.watcher.steps, strict=True):
            # The signal is what is left of |G|^2 without S/B, and as exact as those two.
            rounding = 1e-5 * one.noise_trace / 16
            for name in ("noise_trace", "signal_sqnorm", "gain", "lr"):
                expected = pytest.approx(getattr(one, name), rel=1e-5, abs=rounding)
                assert getattr(other, name) == expected, (one.step, name)
        assert_same(run.weights, runs[0].weights, 1e-5)


def test_a_resumed_run_measures_on_bit_for_bit(tmp_path):
    data = Points(160)
    config = recipe("stop.epochs=1", **ADAM)
    whole = train(config, world_size=2, data=data)[0]
    train(config, world_size=2, data=data, run_dir=tmp_path, stop_after=6)
    second = train(config, world_size=2, data=data, run_dir=tmp_path)[0]
    rest = whole.watcher.steps[6:]
    assert [r.preconditioned for r in second.watcher.steps] == [True] * len(rest)
    for name in ("noise_trace", "signal_sqnorm", "gain", "lr"):
        found = [getattr(r, name) for r in second.watcher.steps]
        assert found == [getattr(r, name) for r in rest]
    assert_same(second.weights, whole.weights, 0.0)


def test_layers_add_up_and_one_sample_is_differenced_through_it():
    layers = train(recipe("stop.epochs=1", **ADAM), world_size=2, data=Points(160))[0]
    state = layers.run.state.estimator.state_dict()
    assert state["preconditioned"] == 1
    assert sum(state["layer_noise"]) == pytest.approx(state["noise_trace"], rel=1e-5)
    one = ADAM | {"batch": {"kind": "fixed", "global_batch": 1}}
    biased = train(recipe("stop.steps=9", "lr_rule.base_batch=1", **one), data=Points(60))[0]
    assert biased.watcher.steps[-1].biased
    assert biased.watcher.steps[-1].preconditioned
    assert biased.watcher.steps[-1].noise_trace > 10 * biased.watcher.steps[4].noise_trace


def test_it_can_be_switched_off_and_other_optimizers_have_none():
    plain = recipe("stop.epochs=1", "statistics.preconditioned=false", **ADAM)
    outcome = train(plain, world_size=2, data=Points(160))[0]
    assert not any(r.preconditioned for r in outcome.watcher.steps)
    sgd = train(recipe("stop.steps=8", "microbatch=2"), world_size=2)[0]
    assert not any(r.preconditioned for r in sgd.watcher.steps)


def test_by_default_it_is_measured_in_each_fifth_step():
    config = {name: value for name, value in ADAM.items() if name != "statistics"}
    outcome = train(recipe("stop.epochs=1", **config), world_size=2, data=Points(160))[0]
    seen = [r.noise_trace for r in outcome.watcher.steps]
    assert [one != other for one, other in pairwise(seen)][:10] == [False] * 4 + [True] + [
        False
    ] * 4 + [True]
    assert [r.preconditioned for r in outcome.watcher.steps[:7]] == [False] * 5 + [True] * 2


def test_the_estimates_are_adaptdls_on_the_same_gradients():
    """Its Adam estimator, one replica with four passes a step; var is that of one pass of four."""
    theirs = pytest.importorskip("adaptdl.torch.gradient_noise_scale", exc_type=ImportError)
    data = Points(160)
    config = ADAM | {
        "lr_rule": {"kind": "none"},
        "statistics": {"every": 1, "half_life_samples": 1},
    }
    outcome = train(recipe("stop.epochs=1", **config), data=data)[0]
    model = linear_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    parallel = SimpleNamespace(require_backward_grad_sync=False)
    noise = theirs.AdamGradientNoiseScale(parallel, optimizer, num_replicas=1, accum_scale=1.0)
    noise._smoothing = 1e-9  # What is read is the step's own.
    for record in outcome.watcher.steps:
        (ids,) = record.sample_ids
        noise.reset_accumulation()
        for start in range(0, 16, 4):
            parallel.require_backward_grad_sync = start == 12
            part = ids[start : start + 4]
            F.cross_entropy(model(data.inputs[part]), data.labels[part]).backward()
        found = optimizer.state.pop("gns")
        rounding = 1e-3 * found["var_avg"][0]
        assert record.noise_trace == pytest.approx(4 * found["var_avg"][0], rel=1e-3)
        assert record.signal_sqnorm == pytest.approx(found["sqr_avg"][0], rel=1e-3, abs=rounding)
        for parameter in model.parameters():
            parameter.grad /= 4
        optimizer.step()
        optimizer.state["gns"] = found
