from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from adaptive_platform.report.headline import key_figures, recipe_differences, sentences
from adaptive_platform.report.run_data import RunData


def run_of(result: dict[str, Any] | None = None, **columns: Any) -> RunData:
    steps: dict[str, Any] = {
        "step": [1, 2, 3, 4],
        "epoch": [0, 0, 0, 0],
        "samples_seen": [10, 20, 30, 40],
        "world_size": [2, 2, 2, 2],
        "global_batch": [10, 10, 10, 10],
        "step_seconds": [1.0, 1.0, 1.0, 1.0],
        "data_seconds": [0.5, 0.5, 0.0, 0.0],
        "lr": [0.1, 0.2, 0.2, 0.1],
        "skipped": [False, False, False, False],
        "time": [100.0, 101.0, 102.0, 103.0],
    }
    return RunData(path="x", steps=pd.DataFrame({**steps, **columns}), result=result)


@pytest.mark.parametrize(
    ("result", "told"),
    [
        (None, "The run is still going on, or was killed, after 4 steps and 40 samples in 3.0 s."),
        (
            {"status": "done", "seconds": 75.0, "loss": 0.5},
            "The run ended after 4 steps and 40 samples in 1 min 15 s, "
            "at a held-out loss of 0.500.",
        ),
        (
            {"status": "done", "seconds": 2.0, "accuracy": 0.5},
            "The run ended after 4 steps and 40 samples over several attempts (the last took 2.0 s)"
            ", at 50.0 % held-out accuracy.",
        ),
        (
            {"status": "failed", "seconds": 9.0, "message": "The loss was not finite."},
            "The run failed after 4 steps and 40 samples in 9.0 s. The loss was not finite.",
        ),
        (
            {"status": "interrupted", "seconds": 9.0, "message": "stopped as asked"},
            "The run was interrupted after 4 steps and 40 samples in 9.0 s. Stopped as asked.",
        ),
    ],
)
def test_the_first_sentence_says_how_it_ended(result: dict[str, Any] | None, told: str) -> None:
    assert sentences(run_of(result))[0] == told


def test_a_steady_run_is_told_as_steady() -> None:
    assert sentences(run_of())[1:] == [
        "The batch stayed at 10, and the learning rate moved between 0.100 and 0.200.",
        "2 workers took part throughout.",
        "Training ran at 10.0 samples per second; the time went to: 75.0 % computing, "
        "25.0 % waiting for data, 0.0 % waiting for the reduction, 0.0 % statistics.",
    ]


def test_changes_are_counted() -> None:
    run = run_of(
        {"status": "done", "broken_samples": 3},
        world_size=[2, 1, 2, 2],
        global_batch=[10, 40, 20, 20],
        skipped=[False, False, True, False],
        step=[1, 2, 3, 3],
    )
    decisions = pd.DataFrame(
        {"step": [1, 2, 3], "old_batch": [10, 40, 20], "new_batch": [40, 20, 20]}
    )
    told = sentences(RunData(path="x", steps=run.steps, decisions=decisions, result=run.result))
    assert told[1].startswith(
        "The batch was raised once and lowered once by the controller: it began at 10, ended at 20 "
        "and was 40 at most"
    )
    assert told[2] == "Between 1 and 2 workers took part; their number changed twice."
    assert told[3] == "1 step was skipped and 3 broken samples were left out."


def test_the_left_over_end_of_an_epoch_is_not_told_as_the_batch() -> None:
    run = run_of(global_batch=[10, 10, 10, 3])
    assert key_figures(run)["global batch"] == "10"


def test_key_figures_leave_out_what_is_not_known() -> None:
    figures = key_figures(run_of())
    assert figures["status"] == "running or killed"
    assert figures["steps"] == "4"
    assert figures["samples per second"] == "10.0"
    assert "held-out accuracy" not in figures


def test_recipe_differences_are_told_by_field() -> None:
    runs = [
        RunData(path="a", recipe={"name": "a", "seed": 1, "batch": {"kind": "fixed", "size": 8}}),
        RunData(path="b", recipe={"name": "b", "seed": 1, "batch": {"kind": "noise_scale"}}),
    ]
    assert recipe_differences(runs) == {
        "batch.kind": ["fixed", "noise_scale"],
        "batch.size": ["8", "–"],
    }
