"""Whole runs on real Ray Train workers, with the small net."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from pathlib import Path

import pandas as pd
import psutil
import pytest
import ray
import torch

import adaptive_platform as ap
from adaptive_platform.cluster.launch import launch
from adaptive_platform.errors import RunFailedError, UserError
from adaptive_platform.recipe import load_recipe

pytestmark = pytest.mark.cluster

SMALL = ["model.name=resnet8_cifar", "report.html=false"]


def small(run_dir: Path, *overrides: str):
    return ap.train("quickstart", *SMALL, f"out={run_dir}", *overrides)


def training_processes() -> list[psutil.Process]:
    """Processes of this test's Ray that run a training function."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            command = " ".join(process.cmdline())
            if "RayTrainWorker" in command or "RecruitWorker" in command:
                found.append(process)
        except psutil.Error:
            continue
    return found


def when_step(run_dir: Path, step: int, act) -> threading.Thread:
    """Call `act` on another thread once the run's checkpoint of `step` is there."""

    def wait() -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if any((run_dir / "checkpoints").glob(f"step-{step:08d}*")):
                act()
                return
            time.sleep(0.05)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def test_train_then_resume_with_another_number_of_workers(shared_ray, tmp_path):
    run_dir = tmp_path / "run"
    result = small(
        run_dir, "stop.epochs=1", "workers=2", "report.record_sample_ids=true", "report.html=true"
    )
    assert (result.status, result.exit_code) == ("done", 0)
    assert list(result.startup_seconds) == [
        "imports",
        "Ray",
        "workers",
        "rendezvous",
        "model and data",
        "first step",
    ]
    steps = pd.read_parquet(run_dir / "steps")
    assert steps.step.tolist() == list(range(1, result.steps + 1))
    assert set(steps.world_size) == {2}
    assert steps.loss.notna().all()
    first_epoch = steps[steps.epoch == 0]
    seen = sorted(i for row in first_epoch.sample_ids for share in row for i in share)
    assert seen == list(range(len(seen)))
    assert len(pd.read_parquet(run_dir / "evals")) >= 1
    assert (run_dir / "report.html").stat().st_size > 1_000_000
    assert json.loads((run_dir / "result.json").read_text())["status"] == "done"
    assert not (run_dir / ".ray").exists()

    again = ap.train(None, f"resume={run_dir}", "workers=3", "stop.epochs=2")
    assert again.status == "done"
    assert result.initial_batch == again.initial_batch == steps.global_batch[0]
    steps = pd.read_parquet(run_dir / "steps")
    assert steps.step.tolist() == list(range(1, again.steps + 1))
    assert set(steps.world_size[result.steps :]) == {3}
    newest = sorted((run_dir / "checkpoints").iterdir())[-1]
    saved = torch.load(newest / "state.pt", weights_only=True)
    model = load_recipe("quickstart", SMALL).model.build(10, 0)
    model.load_state_dict(saved["model"], strict=True)


@pytest.mark.parametrize("live", [True, False])
def test_killed_worker_costs_the_step_in_hand_or_those_since_the_checkpoint(
    shared_ray, tmp_path, live
):
    """F19: SIGKILL of one of three workers; the run ends normally and leaves no process."""
    run_dir = tmp_path / "run"
    killed = []

    def kill() -> None:
        victim = training_processes()[-1]
        killed.append(victim.pid)
        os.kill(victim.pid, signal.SIGKILL)

    thread = when_step(run_dir, 10, kill)
    result = small(
        run_dir,
        "workers=3",
        "checkpoint.every=5 steps",
        "checkpoint.keep_last=100",
        "batch.kind=fixed",
        "batch.global_batch=30",
        "stop.steps=60",
        "lr_rule.kind=none",
        "reducer.kind=torus",
        f"membership.live={live}",
    )
    thread.join(1)
    assert killed, "the kill came too late"
    assert result.status == "done"
    steps = pd.read_parquet(run_dir / "steps")
    assert steps.step.tolist() == list(range(1, 61))
    events = pd.read_parquet(run_dir / "events")
    resumed = events[(events.kind == "resume") & events.text.str.contains("resumed at step")]
    if live:
        assert (events.kind == "lost").sum() == 1
        assert not len(resumed)
        sizes = steps.world_size.tolist()
        assert sizes[0] == 3
        assert 2 in sizes
    else:
        assert len(resumed) == 1
        assert int(resumed.step.iloc[0]) % 5 == 0
    deadline = time.monotonic() + 120
    while training_processes() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not training_processes()


def test_sigterm_to_one_worker_saves_and_all_leave_together(shared_ray, tmp_path):
    """F20: with no checkpoint due for long, SIGTERM to one worker; then resume."""
    run_dir = tmp_path / "run"

    def term_after_some_steps() -> None:
        deadline = time.monotonic() + 200
        while time.monotonic() < deadline:
            parts = list((run_dir / "steps").glob("part-*.parquet"))
            if parts and len(pd.read_parquet(run_dir / "steps")) >= 5:
                os.kill(training_processes()[-1].pid, signal.SIGTERM)
                return
            time.sleep(0.2)

    threading.Thread(target=term_after_some_steps, daemon=True).start()
    settings = [
        "workers=2",
        "checkpoint.every=100000 steps",
        "lr_rule.kind=none",
        "batch.kind=fixed",
        "batch.global_batch=16",
        "stop.steps=100000",
        "report.evaluate_every=100000 steps",
        "report.flush_seconds=0.5",
    ]
    result = small(run_dir, *settings)
    assert (result.status, result.exit_code) == ("interrupted", 143)
    assert 0 < result.steps < 100000
    assert [p.name for p in (run_dir / "checkpoints").iterdir()] == [f"step-{result.steps:08d}"]
    again = ap.train(None, f"resume={run_dir}", f"stop.steps={result.steps + 5}")
    assert again.status == "done"
    assert pd.read_parquet(run_dir / "steps").step.tolist() == list(range(1, result.steps + 6))


def test_failing_model_is_reported_with_its_cause(shared_ray, tmp_path):
    """F31: raises in step 3; the result says failed, the cause, and no worker is left."""

    class Faulty(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(4, 2)
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            if self.calls == 3:
                raise ZeroDivisionError("the third call is broken")
            return self.net(x)

    data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randint(2, (64,)))
    trainer = ap.AdaptiveTrainer(
        "quickstart",
        f"out={tmp_path / 'run'}",
        "max_failures=0",
        "workers=1",
        "report.html=false",
        model=Faulty,
        train_data=data,
    )
    with pytest.raises(RunFailedError, match="ZeroDivisionError: the third call is broken"):
        trainer.fit()
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["status"], result["exit_code"]) == ("failed", 1)
    assert not training_processes()


def test_a_failure_that_passes_is_recovered_from(shared_ray, tmp_path):
    """F31: fails once, recovers, is reported as done."""
    marker = tmp_path / "failed-once"

    class Shaky(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(4, 2)
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            if self.calls == 3 and not marker.exists():
                marker.touch()
                raise ZeroDivisionError("once")
            return self.net(x)

    data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randint(2, (64,)))
    result = ap.AdaptiveTrainer(
        "quickstart",
        f"out={tmp_path / 'run'}",
        "workers=2",
        "report.html=false",
        model=Shaky,
        train_data=data,
    ).fit()
    assert marker.exists()
    assert (result.status, result.exit_code) == ("done", 0)


def test_user_errors_come_from_workers_once_and_leave_nothing(shared_ray, tmp_path):
    run_dir = tmp_path / "run"
    with pytest.raises(UserError, match="/nowhere/train"):
        ap.train(
            "quickstart",
            *SMALL,
            f"out={run_dir}",
            "data.kind=image_folder",
            "data.train=/nowhere/train",
        )
    assert not run_dir.exists()


def test_foreign_checkpoint_is_refused_and_the_run_stays_as_it_was(shared_ray, tmp_path):
    run_dir = tmp_path / "run"
    small(run_dir, "stop.steps=2")

    def content():
        return {p: p.read_bytes() for p in run_dir.rglob("*") if p.is_file()}

    before = content()
    with pytest.raises(UserError, match="checkpoint is of another model"):
        ap.train(None, f"resume={run_dir}", "model.name=resnet20_cifar")
    assert content() == before


def test_an_error_of_one_worker_alone_ends_the_run_for_all(shared_ray, tmp_path):
    """Rank 1 can't read its data in the second epoch; the run ends once, with the cause."""

    class Torn(torch.utils.data.Dataset):
        def __len__(self):
            return 64

        def __getitem__(self, index):
            if ray.train.get_context().get_world_rank() == 1 and index % 8 == 3:
                raise OSError("the disk of this node is gone")
            return torch.ones(4), index % 2

    with pytest.raises(UserError, match=r"train_data\[\d+\]: the disk of this node is gone"):
        ap.AdaptiveTrainer(
            {
                **load_recipe("quickstart").model_dump(mode="json"),
                "data": {"kind": "python", "broken": "stop"},
            },
            f"out={tmp_path / 'run'}",
            "workers=2",
            "report.html=false",
            "reducer.timeout_seconds=1000",  # nobody may wait for it: the test would not end
            model=lambda: torch.nn.Linear(4, 2),
            train_data=Torn(),
        ).fit()


def test_too_many_bad_steps_are_not_tried_again(shared_ray, tmp_path):
    """F24: the same steps would fail the same way: one attempt, with its reason."""
    data = torch.utils.data.TensorDataset(
        torch.full((64, 4), float("nan")), torch.randint(2, (64,))
    )
    with pytest.raises(RunFailedError, match="10 steps in a row were not finite"):
        ap.AdaptiveTrainer(
            "quickstart",
            f"out={tmp_path / 'run'}",
            "workers=2",
            "report.html=false",
            "batch.global_batch=4",
            model=lambda: torch.nn.Linear(4, 2),
            train_data=data,
        ).fit()
    events = pd.read_parquet(tmp_path / "run" / "events")
    assert (events.kind == "skip").sum() == 10


def test_more_workers_than_the_cluster_has_is_refused(shared_ray, tmp_path):
    with pytest.raises(UserError, match="workers = 9: they need 9 CPU, the cluster has 4"):
        small(tmp_path / "run", "workers=9")
    assert not (tmp_path / "run").exists()


def test_an_address_beside_the_ray_in_use_is_refused(shared_ray, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=r"this process already uses the Ray at .*shutdown"):
            small(tmp_path / "run", f"address=127.0.0.1:{port}")
    with pytest.raises(UserError, match="nobody answers"):
        small(tmp_path / "run", f"address=127.0.0.1:{port}")
    ours = ray.get_runtime_context().gcs_address
    assert small(tmp_path / "ours", f"address={ours}", "stop.steps=1").steps == 1


def test_elastic_range_uses_what_is_there(shared_ray, tmp_path):
    result = small(tmp_path / "run", "workers=[1,2]", "stop.steps=3")
    assert (result.status, result.workers) == ("done", 2)


def test_launch_returns_a_result_for_a_recipe_object(shared_ray, tmp_path):
    recipe = load_recipe("quickstart", [*SMALL, "stop.steps=2", f"out={tmp_path / 'run'}"])
    assert launch(recipe).steps == 2
