"""Mixed batches in real runs: against a plain loop, after skips and resumes, what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from runs import Points, assert_same, linear_net, recipe, train
from torch import nn
from torch.nn import functional as F

from adaptive_platform.data.mixing import class_shares, mixed, mixing_weights
from adaptive_platform.errors import UserError

CLASSES = ("a", "b", "c")
RUNNING = {"mixup": {"alpha": 0.6, "running": True}}


@pytest.mark.parametrize("running", [True, False])
def test_a_run_trains_on_the_mixtures(running: bool) -> None:
    """Two micro-batches a step; the one before is that of this worker, mixed itself."""
    data = Points(40)
    config = recipe("stop.steps=4", mixup={"alpha": 0.6, "running": running})
    outcome = train(config, data=data, classes=CLASSES)[0]
    model = linear_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    before = data.inputs[:0], torch.zeros(0, 3)
    for ids in outcome.ids:
        optimizer.zero_grad()
        for part in (ids[:4], ids[4:]):
            x, y = data.inputs[part], class_shares(data.labels[part], 3)
            weights = mixing_weights(config.seed, 0, np.array(part), 0.6)
            others = before if running else (x.flip(0), y.flip(0))
            x, y = mixed(x, others[0], weights), mixed(y, others[1], weights)
            before = x, y
            (F.cross_entropy(model(x), y, reduction="sum") / 8).backward()
        optimizer.step()
    expected = {name: value.detach() for name, value in model.state_dict().items()}
    assert_same(outcome.weights, expected, 1e-5)


def test_a_resumed_run_goes_on_bit_for_bit(tmp_path) -> None:
    config = recipe("stop.steps=9", **RUNNING)
    settings = {"world_size": 2, "classes": CLASSES}
    whole = train(config, **settings)[0]
    train(config, **settings, run_dir=tmp_path, stop_after=4)
    second = train(config, **settings, run_dir=tmp_path)[0]
    assert_same(second.weights, whole.weights, 0.0)


def test_with_other_workers_mixing_starts_anew_and_says_so(tmp_path) -> None:
    config = recipe("stop.steps=8", "batch.global_batch=12", **RUNNING)
    train(config, world_size=2, classes=CLASSES, run_dir=tmp_path, stop_after=4)
    outcome = train(config, world_size=3, classes=CLASSES, run_dir=tmp_path)[0]
    assert any("mixup.running" in event.text for event in outcome.watcher.events)
    assert outcome.run.progress.step == 8


def test_a_dropped_step_is_not_mixed_in() -> None:
    def poisoned(run, outputs, targets):
        losses = F.cross_entropy(outputs, targets, reduction="none")
        bad = run.progress.step == 2 and not run.progress.skipped_steps
        kept.append(run._parts.mixing._before)
        return losses * math.inf if bad else losses

    kept: list = []
    train(recipe("stop.steps=4", **RUNNING), classes=CLASSES, loss=poisoned)
    # Two micro-batches a step: what step 2 began with is what it began anew with.
    assert kept[4] is kept[6]
    assert kept[8] is not kept[6]


class Pictures(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int):
        generator = torch.Generator().manual_seed(index)
        return torch.rand(1, 8, 8, generator=generator) + 0.5, index % 3


def flat_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 3))


def test_erasing_blanks_parts_of_training_images_only() -> None:
    seen = []

    class Watching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = flat_net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append((self.training, bool((x == 0).any())))
            return self.inner(x)

    config = recipe("stop.epochs=1", erasing={"probability": 1.0})
    train(config, data=Pictures(), eval_data=Pictures(), model=Watching)
    assert {blank for training, blank in seen if training} == {True}
    assert {blank for training, blank in seen if not training} == {False}


def test_what_can_not_be_mixed_is_refused() -> None:
    with pytest.raises(UserError, match="does not name its classes"):
        train(recipe("stop.steps=1", mixup={}))
    with pytest.raises(UserError, match="erasing: made for images"):
        train(recipe("stop.steps=1", erasing={}))
