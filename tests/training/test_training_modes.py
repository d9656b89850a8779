"""Models that come in evaluation mode train; layers that alone come in it stay frozen."""

from __future__ import annotations

import pytest
import torch
from living import KilledError, Scene, live
from runs import Points, assert_same, recipe, train
from torch import nn


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4), nn.BatchNorm1d(4),
        nn.Linear(4, 3),
    )  # fmt: skip


def fine_tuned() -> nn.Module:
    """Both batch norms frozen, with averages of their own."""
    model = normed()
    for index in (1, 4):
        model[index].running_mean.fill_(0.25)
        model[index].eval()
    return model


def modes(model: nn.Module) -> list[bool]:
    return [module.training for module in model]


def test_a_pretrained_model_in_evaluation_mode_trains_as_any_other():
    """Three left-over samples make one of two workers' share a single one, were it allowed."""
    config = recipe("batch.global_batch=4", "stop.epochs=1")
    plain = train(config, world_size=2, data=Points(7), model=normed)[0]
    scored = train(config, world_size=2, data=Points(7), model=lambda: normed().eval())[0]
    assert scored.ids == plain.ids
    assert_same(scored.weights, plain.weights, 0.0)


NORMALIZATIONS = {
    "local": {"kind": "local"},
    "ghost": {"kind": "ghost", "samples": 2},
    "recomputed": {"kind": "local", "evaluation": "recomputed", "recompute_samples": 24},
}


@pytest.mark.parametrize("kind", NORMALIZATIONS)
def test_frozen_layers_stay_frozen(kind):
    """Through evaluations, adversaries, curvature and recomputed statistics."""
    batch = {"kind": "absa", "global_batch": 8, "adversarial_fraction": 0.5}
    config = recipe(
        "stop.epochs=2", "report.evaluate_every=1 steps", batch=batch,
        model={"normalization": NORMALIZATIONS[kind]},
    )  # fmt: skip
    outcome = train(config, world_size=2, eval_data=Points(9), model=fine_tuned)[0]
    assert modes(outcome.run.model) == [True, False, True, True, False, True]
    for index in (1, 4):
        assert outcome.weights[f"{index}.num_batches_tracked"] == 0
        assert outcome.weights[f"{index}.running_mean"].tolist() == [0.25] * 4


def test_a_model_whose_batch_norm_is_frozen_trains_on_single_samples():
    config = recipe("batch.global_batch=2", "stop.epochs=1", "microbatch=1")
    outcome = train(config, world_size=2, data=Points(5), model=fine_tuned)[0]
    assert [len(ids) for ids in outcome.ids] == [2, 2, 1]


def test_frozen_layers_stay_frozen_when_a_worker_is_lost_and_one_joins():
    def trouble(scene: Scene) -> None:
        if scene.member == "b" and scene.step == 3:
            raise KilledError

    lives = live(recipe("stop.epochs=2"), 2, trouble, joiners=1, model=fine_tuned)
    for name in "ac":
        assert modes(lives[name].run.model) == [True, False, True, True, False, True]
        assert lives[name].weights["1.num_batches_tracked"] == 0
