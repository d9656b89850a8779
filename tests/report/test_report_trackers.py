"""Trackers: TensorBoard's files are read back, the others are fed through their own functions."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import asdict
from types import SimpleNamespace

import pytest
from report_examples import step_record

from adaptive_platform.errors import UserError
from adaptive_platform.recipe import load_recipe
from adaptive_platform.report.trackers import Trackers, check_trackers

MESSAGES = [
    ("step", asdict(step_record(1)), 0.1),
    ("step", asdict(step_record(2, noise_scale=64.0)), 0.2),
    ("evaluation", {"step": 2, "loss": 0.5, "accuracy": None}, 0.2),
    ("event", {"kind": "note"}, 0.2),
]
RECIPE = {"name": "quick", "batch": {"kind": "fixed", "global_batch": 32}}


def test_tensorboard_files_hold_every_scalar(tmp_path):
    from tensorboardX.proto.event_pb2 import Event

    trackers = Trackers(["tensorboard"], str(tmp_path), RECIPE)
    assert trackers.take(MESSAGES) == []
    trackers.close()
    (path,) = (tmp_path / "tensorboard").iterdir()
    content, found, at = path.read_bytes(), {}, 0
    while at < len(content):  # records: length, its checksum, data, its checksum
        size = int.from_bytes(content[at : at + 8], "little")
        event = Event.FromString(content[at + 12 : at + 12 + size])
        for value in event.summary.value:
            found[value.tag, event.step] = value.simple_value
        at += 16 + size
    assert found["noise_scale", 2] == 64.0
    assert ("noise_scale", 1) not in found
    assert found["eval_loss", 2] == 0.5
    assert found["global_batch", 1] == 32.0
    assert not any(tag == "eval_accuracy" for tag, _ in found)


class Fake(SimpleNamespace):
    """Remembers every call."""

    def __init__(self):
        super().__init__(calls=[])

    def __getattr__(self, name):
        def call(*args, **kwargs):
            self.calls.append((name, args, kwargs))
            return self

        return call


@pytest.mark.parametrize(
    ("kind", "method", "ends"), [("mlflow", "log_metrics", "end_run"), ("wandb", "log", "finish")]
)
def test_others_are_fed_through_their_own_library(kind, method, ends, monkeypatch, tmp_path):
    fake = Fake()
    monkeypatch.setitem(sys.modules, kind, fake)
    trackers = Trackers([kind], str(tmp_path / "run-7"), RECIPE)
    trackers.take(MESSAGES)
    trackers.close()
    logged = [(args[0], kwargs["step"]) for name, args, kwargs in fake.calls if name == method]
    assert [step for _, step in logged] == [1, 2, 2]
    assert logged[1][0]["noise_scale"] == 64.0
    assert logged[2][0] == {"eval_loss": 0.5}
    assert fake.calls[-1][0] == ends
    assert "run-7" in str(fake.calls)
    assert "global_batch" in str(fake.calls[:3])


def test_a_tracker_that_fails_is_dropped_once(monkeypatch, tmp_path):
    class Broken(Fake):
        def log_metrics(self, *_, **__):
            raise OSError("no route to host")

    monkeypatch.setitem(sys.modules, "mlflow", Broken())
    trackers = Trackers(["mlflow"], str(tmp_path), RECIPE)
    assert trackers.take(MESSAGES) == ["mlflow is left out from now on: no route to host"]
    assert trackers.take(MESSAGES) == []


def test_a_tracker_that_can_not_begin_is_told(monkeypatch, tmp_path):
    class Closed(Fake):
        def init(self, *_, **__):
            raise RuntimeError("not logged in")

    monkeypatch.setitem(sys.modules, "wandb", Closed())
    trackers = Trackers(["wandb"], str(tmp_path), RECIPE)
    assert trackers.take(MESSAGES) == ["wandb is left out: not logged in"]
    assert trackers.take(MESSAGES) == []


def test_what_is_not_installed_is_refused_before_the_run(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"report.trackers = wandb: wandb is not installed"):
        check_trackers(["wandb"], "/runs/a")


def test_event_files_need_a_local_path():
    with pytest.raises(UserError, match=r"tensorboard: event files need a local path"):
        check_trackers(["tensorboard"], "s3://bucket/run")
    check_trackers(["tensorboard"], "/runs/a")


def test_the_recipe_names_them():
    assert load_recipe("quickstart", ["report.trackers=[tensorboard]"]).report.trackers == (
        "tensorboard",
    )
    with pytest.raises(UserError, match=r"report.trackers"):
        load_recipe("quickstart", ["report.trackers=[tensorbord]"])
