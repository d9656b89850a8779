from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from report_examples import step_record, write_run

from adaptive_platform.errors import UserError
from adaptive_platform.report import EvalRecord, EventRecord, Journal, RunResult, write_result
from adaptive_platform.report.run_data import RunData, labels, read_run


def test_a_finished_run_is_read_whole(tmp_path: Path) -> None:
    write_run(tmp_path / "first", steps=60)
    run = read_run(tmp_path / "first")
    assert run.name == "first"
    assert run.recipe["model"]["name"] == "resnet50"
    assert len(run.steps) == 61  # one was skipped
    assert run.steps["step"].is_monotonic_increasing
    assert len(run.evals) == 4
    assert run.result is not None
    assert run.result["status"] == "done"


def test_a_run_that_is_going_on_has_no_result(tmp_path: Path) -> None:
    Journal(tmp_path)
    run = read_run(tmp_path)
    assert run.result is None
    assert run.recipe == {}
    assert len(run.steps) == 0
    assert "noise_scale" in run.steps


def test_a_merge_that_was_killed_does_not_double_rows(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for step in range(1, 4):
        journal.step(step_record(step))
        journal.flush()
    merged = tmp_path / "steps" / "part-00000000-00000002-0000000000.parquet"
    pd.concat(
        pd.read_parquet(path) for path in sorted((tmp_path / "steps").iterdir())[:3]
    ).to_parquet(merged)
    assert read_run(tmp_path).steps["step"].tolist() == [1, 2, 3]


def test_a_repeated_evaluation_counts_once_and_events_are_by_time(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    at: dict[str, Any] = {"step": 5, "epoch": 0, "samples_seen": 5}
    journal.evaluation(EvalRecord(**at, loss=2.0))
    journal.event(EventRecord(time=9.0, step=5, kind="stop", text=""))
    journal.flush()
    journal = Journal(tmp_path, 5)
    journal.evaluation(EvalRecord(**at, loss=1.0))
    journal.event(EventRecord(time=3.0, step=5, kind="resume", text=""))
    journal.flush()
    run = read_run(tmp_path)
    assert run.evals["loss"].tolist() == [1.0]
    assert run.events["kind"].tolist() == ["resume", "stop"]


def test_parts_of_an_older_version_lack_columns_and_are_still_read(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.step(step_record(2))
    journal.flush()
    part = tmp_path / "steps" / "part-00000000-00000000-0000000000.parquet"
    old = pd.DataFrame({"step": [1], "loss": [2.5], "retired": ["x"]})
    old.to_parquet(part)
    steps = read_run(tmp_path).steps
    assert steps["loss"].tolist() == [2.5, 1.15]
    assert math.isnan(steps["lr"].iloc[0])
    assert steps["retired"].iloc[0] == "x"


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda path: None, "there is no such directory"),
        (lambda path: path.write_text(""), "is a file"),
        (lambda path: path.mkdir(), "neither recipe.yaml nor steps/"),
        (lambda path: write_run(path / "inner", steps=4), "It holds runs: inner"),
    ],
)
def test_what_is_not_a_run_is_named(tmp_path: Path, make: Any, told: str) -> None:
    path = tmp_path / "given"
    make(path)
    with pytest.raises(UserError, match=told):
        read_run(path)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("recipe.yaml", "recipe.yaml is not valid YAML"),
        ("result.json", "result.json is not valid JSON"),
        ("steps/part-00000009-00000009-0000000009.parquet", "records in steps/ can't be read"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, told: str) -> None:
    write_run(tmp_path / "run", steps=4)
    (tmp_path / "run" / name).write_text("{ half")
    with pytest.raises(UserError, match=told):
        read_run(tmp_path / "run")


def test_a_recipe_cannot_run_code(tmp_path: Path) -> None:
    Journal(tmp_path)
    (tmp_path / "recipe.yaml").write_text("name: !!python/object/apply:os.getcwd []")
    with pytest.raises(UserError, match="not valid YAML"):
        read_run(tmp_path)


def test_a_directory_named_like_a_partition_adds_no_column(tmp_path: Path) -> None:
    write_run(tmp_path / "workers=2" / "run", steps=4)
    assert "workers" not in read_run(tmp_path / "workers=2" / "run").steps


def test_labels_tell_runs_apart() -> None:
    assert labels([RunData(path="a/x"), RunData(path="a/y/")]) == ["x", "y"]
    assert labels([RunData(path="a/x"), RunData(path="b/x")]) == ["a/x", "b/x"]
    assert labels([RunData(path="x"), RunData(path="x")]) == ["x (1)", "x (2)"]


def test_result_is_strict_json_and_replaced_whole(tmp_path: Path) -> None:
    write_result(tmp_path, RunResult(status="failed", exit_code=1, loss=math.nan))
    write_result(
        tmp_path,
        RunResult(status="done", exit_code=0, loss=math.inf, startup_seconds={"ray": math.nan}),
    )
    result = json.loads((tmp_path / "result.json").read_text(), parse_constant=pytest.fail)
    assert (result["status"], result["loss"]) == ("done", None)
    assert result["startup_seconds"] == {"ray": None}
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]
