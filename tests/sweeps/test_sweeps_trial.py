"""A trial without Ray: what it reports, how it goes on, how it takes over another one's weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from adaptive_platform.checkpoints.store import CheckpointStore
from adaptive_platform.cluster import launch as training
from adaptive_platform.report import RunResult
from adaptive_platform.sweeps.config import load_sweep
from adaptive_platform.sweeps.score import WORST
from adaptive_platform.sweeps.trial import STOP_NAME, SweepTrial, TrialFailedError, run_dir_of

STEP = {"step": 3, "samples_seen": 96, "global_batch": 32, "lr": 0.1}


@pytest.fixture
def sweep_dir(tmp_path) -> Path:
    folder = tmp_path / "sweep"
    folder.mkdir()
    (folder / "sweep.yaml").write_text(load_sweep("controllers").to_yaml())
    return folder


def trial(sweep_dir: Path, name: str = "ab_00001") -> SweepTrial:
    """As Tune makes it, without Tune."""
    made = SweepTrial.__new__(SweepTrial)
    made._trial_info = type("Info", (), {"trial_id": name})()
    made.config = {"dir": str(sweep_dir), "fields": {"batch.kind": "fixed", "seed": 1}}
    made.setup(made.config)
    return made


def runs(monkeypatch, *messages, result: RunResult, seen: list) -> None:
    """Replace the launch by one that hands over messages and ends."""

    def launch(recipe, *, watch, sweep):
        seen.append((recipe, sweep))
        stopped = [watch([message]) for message in messages]
        while result.status == "interrupted" and not stopped[-1]:
            stopped.append(watch([]))
        return result

    monkeypatch.setattr(training, "launch", launch)


def test_scores_are_reported_as_they_come(sweep_dir, monkeypatch):
    seen: list = []
    evaluation = {"step": 3, "accuracy": 0.5, "loss": 1.5}
    runs(
        monkeypatch,
        ("step", STEP, 0.5),
        ("decision", {"new_batch": 64}, 0.5),
        ("evaluation", evaluation, 0.5),
        result=RunResult(status="done", exit_code=0, accuracy=0.75, loss=1.0, final_batch=64),
        seen=seen,
    )
    made = trial(sweep_dir)
    first, last = made.step(), made.step()
    assert (first["accuracy"], first["percent"], first["batch"]) == (0.5, 50.0, 64)
    assert "done" not in first
    assert (last["accuracy"], last["ended"], last["done"]) == (0.75, "done", True)
    ((recipe, sweep),) = seen
    assert sweep == "controllers"
    assert recipe.name == "controllers-00001"
    assert recipe.out == run_dir_of(str(sweep_dir), "ab_00001") == f"{sweep_dir}/trials/00001"
    assert (recipe.seed, recipe.batch.kind, recipe.workers) == (1, "fixed", 1)


def test_a_short_last_slice_is_not_taken_for_the_batch(sweep_dir, monkeypatch):
    evaluation = {"step": 3, "accuracy": 0.5, "loss": 1.5}
    runs(
        monkeypatch,
        ("batch", {"initial": 32, "now": 48}, 0.0),  # goes on after a resume
        ("step", STEP | {"global_batch": 5}, 0.5),
        ("evaluation", evaluation, 0.5),
        result=RunResult(status="interrupted", exit_code=143),
        seen=[],
    )
    made = trial(sweep_dir)
    assert made.step()["batch"] == 48
    made.cleanup()


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_the_worst_score_and_at_the_end_a_failure(
    loss, sweep_dir, monkeypatch
):
    runs(
        monkeypatch,
        ("evaluation", {"step": 3, "accuracy": 0.9, "loss": 1.5}, 0.25),
        ("evaluation", {"step": 6, "accuracy": 0.9, "loss": loss}, 0.5),
        result=RunResult(status="done", exit_code=0, accuracy=0.9, loss=loss),
        seen=[],
    )
    made = trial(sweep_dir)
    assert made.step()["score"] == 0.9
    diverged = made.step()
    assert diverged["score"] == WORST
    assert diverged["accuracy"] == 0.9
    assert str(diverged["loss"]) == str(loss)
    with pytest.raises(TrialFailedError, match=f"ended with a held-out loss of {loss}"):
        made.step()


def test_the_score_follows_the_sweeps_metric_and_is_there_without_it(sweep_dir, monkeypatch):
    text = load_sweep("controllers", ["metric=loss"]).to_yaml()
    (sweep_dir / "sweep.yaml").write_text(text)
    runs(
        monkeypatch,
        ("evaluation", {"step": 3, "accuracy": None, "loss": 1.5}, 0.5),
        result=RunResult(status="done", exit_code=0),
        seen=[],
    )
    made = trial(sweep_dir)
    first, last = made.step(), made.step()
    assert (first["score"], first["loss"]) == (-1.5, 1.5)
    assert "accuracy" not in first
    assert (last["score"], last["ended"]) == (WORST, "done")


def test_a_failed_run_is_a_failed_trial(sweep_dir, monkeypatch):
    result = RunResult(status="failed", exit_code=1, message="worker 0: no memory")
    runs(monkeypatch, ("step", STEP, 0.1), result=result, seen=[])
    with pytest.raises(TrialFailedError, match="worker 0: no memory"):
        trial(sweep_dir).step()


def test_a_run_that_somebody_else_stopped_has_not_ended_well(sweep_dir, monkeypatch):
    result = RunResult(status="interrupted", exit_code=143, message="stopped as asked")
    monkeypatch.setattr(training, "launch", lambda *_, **__: result)
    with pytest.raises(TrialFailedError, match="stopped as asked"):
        trial(sweep_dir).step()


def test_the_sweeps_wish_to_stop_reaches_the_run(sweep_dir, monkeypatch):
    result = RunResult(status="interrupted", exit_code=143)
    runs(monkeypatch, ("step", STEP, 0.25), result=result, seen=[])
    (sweep_dir / STOP_NAME).touch()
    made = trial(sweep_dir)
    assert "done" not in made.step()
    with pytest.raises(TrialFailedError, match="its run was stopped"):
        made.step()  # Tune asks once more; nobody is there to wait for


def save(folder: str, step: int) -> None:
    CheckpointStore(folder).save({"step": step}, step)
    Path(folder, "recipe.yaml").write_text("{}")


def test_a_trial_goes_on_from_its_newest_checkpoint_and_else_begins_anew(sweep_dir, monkeypatch):
    seen: list = []
    result = RunResult(status="done", exit_code=0)
    folder = run_dir_of(str(sweep_dir), "ab_00001")
    Path(folder).mkdir(parents=True)
    Path(folder, "recipe.yaml").write_text("{}")  # it died before its first checkpoint
    runs(monkeypatch, result=result, seen=seen)
    trial(sweep_dir).step()
    assert (seen[-1][0].out, seen[-1][0].resume) == (folder, None)
    assert not Path(folder).exists()
    save(folder, 4)
    trial(sweep_dir).step()
    assert (seen[-1][0].out, seen[-1][0].resume) == (None, folder)


def test_weights_are_taken_over_from_another_trial(sweep_dir, tmp_path, monkeypatch):
    strong, weak = (run_dir_of(str(sweep_dir), f"ab_{n}") for n in ("00000", "00001"))
    for step in (5, 10):
        save(strong, step)
    save(weak, 12)
    runs(
        monkeypatch,
        ("evaluation", {"step": 10, "accuracy": 0.9, "loss": 0.1}, 0.5),
        result=RunResult(status="interrupted", exit_code=143),
        seen=[],
    )
    giver = trial(sweep_dir, "ab_00000")
    giver.step()
    copied = tmp_path / "copied"
    copied.mkdir()
    giver.save_checkpoint(str(copied))
    giver.cleanup()
    assert [path.name for path in copied.iterdir()] == ["step-00000010"]
    taker = trial(sweep_dir)
    assert taker.reset_config({**taker.config, "fields": {"seed": 0}})
    taker.load_checkpoint(str(copied))
    found = CheckpointStore(weak).load_newest()
    assert found is not None
    assert found[0].step == 10
    assert json.loads(next(Path(weak).glob("*/*/manifest.json")).read_text())["step"] == 10
    assert len(CheckpointStore(weak).saved()) == 1


def test_nothing_to_take_over_changes_nothing(sweep_dir, tmp_path):
    folder = run_dir_of(str(sweep_dir), "ab_00001")
    save(folder, 2)
    empty = tmp_path / "empty"
    empty.mkdir()
    trial(sweep_dir).load_checkpoint(str(empty))
    assert [saved.step for saved in CheckpointStore(folder).saved()] == [2]
