"""VRGD end to end: the worked example in every optimizer, intervals, resumes, uneven shares."""

from __future__ import annotations

import pytest
import torch
from runs import Points, assert_same, linear_net, recipe, train
from torch import nn
from torch.nn import functional as F

from adaptive_platform.errors import RunFailedError

DEVICES = ([1.0, 2.0, 3.0], [1.2, 0.0, -1.0])


class TwoRows(torch.utils.data.Dataset):
    """The fact sheet's device gradients as inputs: the loss `w . x` has the gradient x."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return torch.tensor(DEVICES[index]), 0


def weights_after(kind: str, vr, steps: int = 1, start: float = 1.0, **optimizer):
    def net():
        layer = nn.Linear(3, 1, bias=False)
        nn.init.constant_(layer.weight, start)
        return layer

    fields = {"kind": kind, "lr": 0.1, "weight_decay": 0.0, "exclude": "none"} | optimizer
    outcomes = train(
        recipe(f"stop.steps={steps}", "batch.global_batch=2", optimizer=fields, vr=vr),
        world_size=2,
        data=TwoRows(),
        model=net,
        loss=lambda run, outputs, targets: outputs[:, 0],
    )
    assert_same(outcomes[0].weights, outcomes[1].weights, 0.0)
    return outcomes[0].weights["weight"][0]


def reference(build, gradient, steps=1):
    weight = nn.Parameter(torch.ones(1, 3))
    optimizer = build([weight])
    for _ in range(steps):
        weight.grad = gradient.clone()[None]
        optimizer.step()
    return weight.detach()[0]


REDUCED = torch.tensor([1.1, 0.1, 0.1])


def test_sgd_moves_by_the_worked_example():
    moved = 1.0 - weights_after("sgd", {}, momentum=0.0)
    torch.testing.assert_close(moved, 0.1 * REDUCED)


def test_momentum_and_adam_see_the_reduced_gradient():
    expected = reference(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), REDUCED, steps=3)
    torch.testing.assert_close(weights_after("sgd", {}, steps=3, momentum=0.9), expected)
    expected = reference(
        lambda p: torch.optim.AdamW(p, lr=0.1, eps=0.1, weight_decay=0.0), REDUCED, steps=3
    )
    torch.testing.assert_close(weights_after("adamw", {}, steps=3, eps=0.1), expected)


@pytest.mark.parametrize("kind", ["lars", "lamb"])
def test_layer_wise_rates_come_from_the_reduced_gradient(kind):
    """The same optimizer, fed the reduced gradient by hand."""
    fields = {"kind": kind, "lr": 0.1, "weight_decay": 0.0, "exclude": "none"}
    fields |= {"trust_coefficient": 0.1} if kind == "lars" else {"eps": 0.1}
    optimizer = recipe(optimizer=fields).optimizer
    weight = nn.Parameter(torch.ones(1, 3))
    by_hand = optimizer.build([("weight", weight)])
    for _ in range(3):
        weight.grad = REDUCED.clone()[None]
        by_hand.step()
    chosen = {k: v for k, v in fields.items() if k not in ("kind", "lr", "weight_decay", "exclude")}
    torch.testing.assert_close(weights_after(kind, {}, steps=3, **chosen), weight.detach()[0])


@pytest.mark.parametrize(("world_size", "tolerance"), [(1, 0.0), (2, 0.0), (3, 1e-6)])
def test_gamma_one_is_plain(world_size, tolerance):
    """With three workers the halves add in another order than Gloo's own all-reduce."""
    plain = train(recipe("microbatch=2"), world_size=world_size)[0]
    one = train(recipe("microbatch=2", vr={"gamma": 1.0}), world_size=world_size)[0]
    assert_same(one.weights, plain.weights, tolerance)


def by_hand(steps, data, every, gamma=0.1):
    """One process: mean and spread over micro-batches, weighted by their samples."""
    model = linear_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ratios = None
    for number, parts in enumerate(steps):
        total = sum(map(len, parts))
        mean = [torch.zeros_like(p) for p in model.parameters()]
        square = [torch.zeros_like(p) for p in model.parameters()]
        for part in parts:
            loss = F.cross_entropy(model(data.inputs[part]), data.labels[part])
            for m, s, g in zip(
                mean, square, torch.autograd.grad(loss, list(model.parameters())), strict=True
            ):
                m += g * len(part) / total
                s += g.square() * len(part) / total
        if number % every == 0:
            ratios = []
            for m, s in zip(mean, square, strict=True):
                ratio = m.square() / torch.maximum(s - m.square(), 1e-6 * m.square())
                ratios.append((ratio / ratio.mean()).clamp(gamma, 1.0))
        for p, m, r in zip(model.parameters(), mean, ratios, strict=True):
            p.grad = m * r
        optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize(("world_size", "batch"), [(2, 8), (3, 8), (1, 10)])
def test_any_split_follows_the_formula_also_between_refreshes(every, world_size, batch):
    """8 samples over 3 workers, and 10 in micro-batches of 4, are uneven."""
    data = Points(64)
    outcomes = train(
        recipe(f"batch.global_batch={batch}", "microbatch=4", "stop.steps=6", vr={"every": every}),
        world_size=world_size,
        data=data,
    )
    steps = []
    for record in outcomes[0].watcher.steps:
        parts = []
        for share in record.sample_ids:
            pieces = -(-len(share) // 4)
            size, larger = divmod(len(share), pieces)
            sizes = [size + 1] * larger + [size] * (pieces - larger)
            parts += [part.tolist() for part in torch.tensor(share).split(sizes)]
        steps.append(parts)
    expected = by_hand(steps, data, every)
    for outcome in outcomes:
        assert_same(outcome.weights, expected, 2e-4)
        assert_same(outcome.weights, outcomes[0].weights, 0.0)


@pytest.mark.parametrize("layers", [False, True])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_norms_are_those_of_gradients_before_they_are_reduced(kind, layers):
    """Taken on shards, they are what a run without ratios finds from the same weights.

    Adam looks through averages of what came to it, so there the ratios are all one.
    """
    config = recipe(
        "stop.steps=12",
        "statistics.every=1",
        f"statistics.layers={layers}".lower(),
        microbatch=4,
        optimizer={"kind": kind, "lr": 1e-9},
        lr_rule={"kind": "adascale"},
    )
    gamma = 1.0 if kind == "adamw" else 0.1
    with_ratios = config.model_copy(update={"vr": recipe(vr={"every": 4, "gamma": gamma}).vr})
    plain = train(config, world_size=2)[0]
    for world_size in (1, 2, 3):
        reduced = train(with_ratios, world_size=world_size)[0]
        for one, other in zip(plain.watcher.steps, reduced.watcher.steps, strict=True):
            assert other.grad_sqnorm == pytest.approx(one.grad_sqnorm, rel=1e-4)
            if world_size == 2 and one.noise_scale is not None:
                assert other.noise_scale == pytest.approx(one.noise_scale, rel=1e-3)


def test_a_skipped_refresh_leaves_the_ratios_and_names_the_parameter():
    """Whoever owns the bad element, all workers see it."""

    def loss(run, outputs, targets):
        losses = F.cross_entropy(outputs, targets, reduction="none")
        return losses * float("nan") if run.progress.samples == 16 and not skipped(run) else losses

    def skipped(run):
        return run.state.skipped_in_a_row > 0

    outcomes = train(recipe("stop.steps=5", microbatch=2, vr={}), world_size=3, loss=loss)
    for outcome in outcomes:
        assert_same(outcome.weights, outcomes[0].weights, 0.0)
        assert all(torch.isfinite(w).all() for w in outcome.weights.values())
    told = [e.text for e in outcomes[0].watcher.events if e.kind == "skip"]
    assert told == ["step dropped by all workers: non-finite gradient of `0.weight`"]


@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
def test_narrower_gradients_between_workers_only_round(wire):
    """Squares, norms and votes stay exact; all workers apply the same rounded gradient."""
    config = recipe("stop.steps=6", microbatch=2, vr={"every": 2, "gamma": 0.5})
    narrowed = recipe(
        "stop.steps=6",
        microbatch=2,
        vr={"every": 2, "gamma": 0.5},
        reducer={"kind": "torus", "wire_dtype": wire},
    )
    exact, rounded = (train(each, world_size=4) for each in (config, narrowed))
    for outcome in rounded:
        assert_same(outcome.weights, rounded[0].weights, 0.0)
    assert_same(rounded[0].weights, exact[0].weights, 3e-2)
    assert [s.skipped for s in rounded[0].watcher.steps] == [False] * 6


def test_what_overflows_between_workers_is_noticed_in_a_refresh():
    """Two gradients that fit float16 and whose sum does not: seen before anyone has it."""
    config = recipe(
        "stop.steps=2",
        "batch.global_batch=2",
        "precision.max_skipped_in_a_row=2",
        vr={},
        optimizer={"kind": "sgd", "lr": 0.1, "momentum": 0.0},
        reducer={"kind": "ring", "wire_dtype": "float16"},
    )
    with pytest.raises(RunFailedError, match="were not finite"):
        train(
            config,
            world_size=2,
            data=TwoRows(),
            model=lambda: nn.Linear(3, 1, bias=False),
            loss=lambda run, outputs, targets: outputs[:, 0] * 6e4,
        )


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_a_resume_in_the_middle_of_an_interval_is_the_same_run(tmp_path, kind):
    config = recipe(
        "stop.steps=9", optimizer={"kind": kind, "lr": 0.01}, vr={"every": 4}, microbatch=2
    )
    whole = train(config, world_size=2)[0]
    train(config, world_size=2, run_dir=tmp_path, stop_after=6)
    second = train(config, world_size=2, run_dir=tmp_path)[0]
    assert_same(second.weights, whole.weights, 0.0)


def test_a_step_of_one_device_is_held_and_told_once():
    """Batch 1 has no spread: gradients stay plain until two samples make two devices."""
    plain = train(recipe("batch.global_batch=1", "stop.steps=5"))[0]
    held = train(recipe("batch.global_batch=1", "stop.steps=5", vr={}))[0]
    assert_same(held.weights, plain.weights, 0.0)
    assert [e.text for e in held.watcher.events if e.text.startswith("vr: held")] == [
        "vr: held in steps of one micro-batch, as a variance needs two; use more workers or a "
        "smaller microbatch"
    ]


def test_the_loss_scale_of_float16_cancels():
    """Squares carry the scale twice."""
    scaled = train(recipe("microbatch=2", vr={}), world_size=2)[0]
    config = recipe("microbatch=2", vr={})
    halves = config.model_copy(
        update={"precision": config.precision.model_copy(update={"dtype": "float16"})}
    )
    # No autocast here, since the loop is the test's own: only the scale of the losses differs.
    other = train(halves, world_size=2)[0]
    assert other.run.state.loss_scale.value == 65536.0
    assert_same(other.weights, scaled.weights, 5e-3)


def test_clipping_changes_the_length_of_a_step_and_not_the_ratios():
    """Mean and squares are clipped alike, so each element keeps its share."""

    def moved(*words: str) -> torch.Tensor:
        config = recipe("stop.steps=1", "microbatch=2", "optimizer.momentum=0", *words, vr={})
        after = train(config, world_size=2)[0].weights
        before = linear_net().state_dict()
        return torch.cat([(after[name] - before[name]).flatten() for name in after])

    plain, clipped = moved(), moved("clip_norm=0.05")
    assert float(clipped.norm()) < 0.5 * float(plain.norm())
    torch.testing.assert_close(clipped / clipped.norm(), plain / plain.norm(), rtol=1e-3, atol=1e-5)
