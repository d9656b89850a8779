"""Averages, ensembles, and rates that move: against plain loops, and after a resume."""

from __future__ import annotations

import pytest
import torch
from runs import Points, assert_same, linear_net, recipe, train
from test_training_normalization import normed_net
from torch.nn import functional as F

from adaptive_platform.errors import UserError

EVAL = Points(24, seed=9)
CYCLES = {"kind": "cyclic_tail", "cycles": 3, "tail_start": 0.25}


def loss_of(weights: dict[str, torch.Tensor]) -> float:
    model = linear_net()
    model.load_state_dict(weights)
    return F.cross_entropy(model(EVAL.inputs), EVAL.labels).item()


@pytest.mark.parametrize("world", [1, 2])
def test_an_exponential_average_is_what_is_scored(world: int) -> None:
    config = recipe("stop.steps=7", averaging={"kind": "ema", "decay": 0.8, "every": 2})
    outcome = train(config, world_size=world, eval_data=EVAL, keep_history=True)[0]
    history = outcome.history
    assert len(history) == 7
    average = dict(history[1])
    for step in (3, 5):
        average = {n: 0.8 * v + 0.2 * history[step][n] for n, v in average.items()}
    assert outcome.watcher.evaluations[-1].loss == pytest.approx(loss_of(average), rel=1e-5)
    assert loss_of(average) != pytest.approx(loss_of(history[-1]), rel=1e-3)


def test_an_equal_average_starts_late() -> None:
    config = recipe("stop.steps=8", averaging={"kind": "swa", "start": 0.5})
    outcome = train(config, eval_data=EVAL, keep_history=True)[0]
    visited = outcome.history[3:]
    average = {n: torch.stack([h[n] for h in visited]).mean(0) for n in visited[0]}
    assert outcome.watcher.evaluations[-1].loss == pytest.approx(loss_of(average), rel=1e-5)


def test_an_ensemble_averages_the_probabilities_of_its_snapshots() -> None:
    config = recipe("stop.steps=12", ensemble=True, schedule=CYCLES)
    outcome = train(config, world_size=2, eval_data=EVAL, keep_history=True)[0]
    ends = [6, 9, 12]
    assert [e.step for e in outcome.watcher.evaluations if e.step in ends] == ends
    for number, step in enumerate(ends, start=1):
        members = []
        for end in ends[:number]:
            model = linear_net()
            model.load_state_dict(outcome.history[end - 1])
            members.append(model(EVAL.inputs).softmax(1))
        mean = torch.stack(members).mean(0)
        expected = F.nll_loss(mean.log(), EVAL.labels).item()
        found = next(e for e in outcome.watcher.evaluations if e.step == step)
        assert found.loss == pytest.approx(expected, rel=1e-5)
        alone = [F.nll_loss(m.log(), EVAL.labels).item() for m in members]
        assert found.loss <= sum(alone) / len(alone) + 1e-6


SETTINGS = {
    "ema": {"averaging": {"kind": "ema", "decay": 0.9}},
    "swa": {"averaging": {"kind": "swa", "start": 0.3}},
    "ensemble": {"ensemble": True, "schedule": CYCLES},
    "recomputed": {
        "averaging": {"kind": "swa"},
        "model": {"normalization": {"kind": "local", "evaluation": "recomputed"}},
    },
    "rates": {
        "momentum_schedule": {"kind": "cosine", "end": 0.5},
        "weight_decay_schedule": {"kind": "step", "fractions": [0.5]},
        "optimizer": {"kind": "sgd", "lr": 0.1, "weight_decay": 0.1},
    },
}


@pytest.mark.parametrize("content", SETTINGS.values(), ids=list(SETTINGS))
@pytest.mark.parametrize("stop_after", [5, 6])
def test_a_resumed_run_goes_on_bit_for_bit(content, stop_after, tmp_path) -> None:
    config = recipe("stop.steps=12", **content)
    settings = {"world_size": 2, "eval_data": EVAL, "model": normed_net}
    whole = train(config, **settings)[0]
    train(config, **settings, run_dir=tmp_path, stop_after=stop_after)
    second = train(config, **settings, run_dir=tmp_path)[0]
    assert_same(second.weights, whole.weights, 0.0)
    scores = {e.step: e.loss for e in whole.watcher.evaluations}
    for evaluation in second.watcher.evaluations:
        assert evaluation.loss == scores[evaluation.step]


def test_momentum_and_decay_follow_their_schedules() -> None:
    data = Points(40)
    config = recipe(
        "stop.steps=6",
        optimizer={"kind": "sgd", "lr": 0.1, "momentum": 0.8, "weight_decay": 0.1},
        momentum_schedule={"kind": "polynomial", "power": 1.0, "end": 0.5},
        weight_decay_schedule={"kind": "step", "fractions": [0.5], "decay": 0.1},
    )
    outcome = train(config, data=data, model=linear_net)[0]
    model = linear_net()
    excluded = [p for p in model.parameters() if p.ndim == 1]
    decayed = [p for p in model.parameters() if p.ndim > 1]
    optimizer = torch.optim.SGD(
        [{"params": decayed}, {"params": excluded}], lr=0.1, momentum=0.8, weight_decay=0.0
    )
    for step, ids in enumerate(outcome.ids):
        for group in optimizer.param_groups:
            group["momentum"] = 0.8 * (1.0 - 0.5 * step / 6)
        optimizer.param_groups[0]["weight_decay"] = 0.1 if step < 3 else 0.01
        optimizer.zero_grad()
        F.cross_entropy(model(data.inputs[ids]), data.labels[ids]).backward()
        optimizer.step()
    expected = {name: value.detach() for name, value in model.state_dict().items()}
    assert_same(outcome.weights, expected, 1e-5)


@pytest.mark.parametrize(
    ("words", "content", "message"),
    [
        ([], {"ensemble": True}, r"ensemble = true.*schedule\.kind = constant has none"),
        ([], {"ensemble": True, "schedule": CYCLES, "averaging": {}}, "averaging: with ensemble"),
        (["sync.kind=local_sgd"], {"averaging": {}}, r"averaging: .*sync\.kind = local_sgd"),
        (["optimizer.momentum=0"], {"momentum_schedule": {"kind": "cosine"}}, "momentum_schedule"),
        ([], {"weight_decay_schedule": {"kind": "cosine"}}, "weight_decay = 0"),
        ([], {"averaging": {"kind": "swa", "decay": 0.9}}, "averaging"),
        (
            [],
            {"momentum_schedule": {"kind": "cosine", "warmup": "5 steps"}},
            "warmup = 5 steps: the run ends after 2 epochs",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(words, content, message) -> None:
    with pytest.raises(UserError, match=message):
        recipe(*words, **content)
