"""What a recipe will do is what its run does, and can be seen before."""

from __future__ import annotations

import json

import pytest
from runs import Points, recipe, train
from typer.testing import CliRunner

from adaptive_platform.cli import app
from adaptive_platform.errors import UserError
from adaptive_platform.optimizers import ScheduleConfig
from adaptive_platform.settings import variants_of
from adaptive_platform.training.rate_plan import plan_rates


@pytest.mark.parametrize("kind", variants_of(ScheduleConfig))
def test_the_planned_rates_are_those_of_the_run(kind: str) -> None:
    config = recipe("stop.steps=10", schedule={"kind": kind, "warmup": "2 steps"})
    outcome = train(config, data=Points(80))[0]
    planned = [point.lr for point in plan_rates(config, points=11).points]
    assert outcome.lrs == pytest.approx(planned[:10])


def test_planned_batches_follow_their_schedule_and_the_rule_follows_them() -> None:
    stages = [{"at": "1 epochs", "batch": 16}, {"at": "2 epochs", "batch": 40}]
    config = recipe(
        "stop.epochs=3",
        batch={"kind": "schedule", "global_batch": 8, "stages": stages},
        lr_rule={"kind": "linear"},
    )
    outcome = train(config, data=Points(80))[0]
    plan = plan_rates(config, points=31, dataset_size=80)
    for point in plan.points[:-1]:
        epoch = int(point.time + 1e-9)
        record = next(r for r in outcome.watcher.steps if r.epoch == epoch)
        assert point.batch == record.global_batch
        assert point.lr == pytest.approx(record.lr)
    assert plan.notes == ()


def test_momentum_and_decay_are_planned_and_notes_say_what_is_measured() -> None:
    config = recipe(
        "stop.epochs=4",
        batch={"kind": "noise_scale", "global_batch": 8},
        lr_rule={"kind": "adascale"},
        optimizer={"kind": "sgd", "lr": 0.1, "momentum": 0.8, "weight_decay": 0.1},
        momentum_schedule={"kind": "polynomial", "power": 1, "end": 0.5},
        weight_decay_schedule={"kind": "step", "fractions": [0.5], "decay": 0.1},
    )
    plan = plan_rates(config, points=5)
    assert [point.momentum for point in plan.points] == pytest.approx([0.8, 0.7, 0.6, 0.5, 0.4])
    decays = [point.weight_decay for point in plan.points]
    assert decays == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.01])
    assert {point.batch for point in plan.points} == {8}
    assert any("noise_scale decides" in note for note in plan.notes)
    assert any("gain of 1" in note for note in plan.notes)


def test_the_command_prints_and_draws(tmp_path) -> None:
    words = ["plan", "schedule", "quickstart", "stop.epochs=9", "schedule.warmup=3 epochs"]
    page = tmp_path / "plan.html"
    result = CliRunner().invoke(app, [*words, "--out", str(page)], catch_exceptions=False)
    assert result.exit_code == 0
    assert "learning rate" in result.output
    assert "weight decay" in page.read_text(encoding="utf-8")
    picture = tmp_path / "plan.png"
    result = CliRunner().invoke(app, [*words, "--json", "--out", str(picture)])
    points = [json.loads(line) for line in result.output.splitlines() if line.startswith("{")]
    assert points[0]["lr"] == 0.0
    assert points[-1]["time"] == 9.0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_another_ending_is_refused(tmp_path) -> None:
    result = CliRunner().invoke(app, ["plan", "schedule", "--out", str(tmp_path / "plan.gif")])
    assert isinstance(result.exception, UserError)
    assert r".html or .png" in str(result.exception)


def test_parameter_groups_and_coverage_are_printed_on_request() -> None:
    """F10, F12."""
    words = ["plan", "parameters", "quickstart", "model.name=resnet8_cifar", "--classes", "3"]
    result = CliRunner().invoke(app, [*words, "optimizer.kind=sp_ngd"], catch_exceptions=False)
    assert "group decay: 10 tensors, 76,912 elements, weight decay 0" in result.output
    assert "fc.weight (3, 64)" in result.output
    assert "group excluded" in result.output
    assert "natural gradient: 19 layers: conv1, bn1" in result.output
