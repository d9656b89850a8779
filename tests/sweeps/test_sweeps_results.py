"""Rows, table, importance and page of a sweep, from made-up trials."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from plotly.offline import get_plotlyjs
from report_examples import write_run

from adaptive_platform.sweeps.config import load_sweep
from adaptive_platform.sweeps.importance import importance
from adaptive_platform.sweeps.page import render_page
from adaptive_platform.sweeps.results import TrialRow, best_of, frame, row_of, write_table


def trial(status="TERMINATED", last=None, error="", name="ab12_00003", fields=None):
    config = {"fields": fields or {"optimizer.lr": 0.1}, "dir": "/sweep"}
    return SimpleNamespace(
        trial_id=name, status=status, last_result=last or {}, error_file=error, config=config
    )


@pytest.mark.parametrize(
    ("status", "last", "told"),
    [
        ("TERMINATED", {"ended": "done", "accuracy": 0.9, "percent": 100.0}, "done"),
        ("TERMINATED", {"accuracy": 0.1, "percent": 25.0}, "stopped early"),
        ("RUNNING", {}, "running"),
        ("PENDING", {}, "waiting"),
        ("PAUSED", {"accuracy": 0.1}, "waiting"),
        ("ERROR", {"accuracy": 0.1}, "failed"),
    ],
)
def test_status_of_a_trial(status, last, told, tmp_path):
    row = row_of(trial(status, last), str(tmp_path))
    assert row.status == told
    assert row.trial == "00003"
    assert row.accuracy == last.get("accuracy")


def test_the_cause_of_a_failure_is_its_own_sentence(tmp_path):
    error = tmp_path / "error.txt"
    error.write_text(
        "Failure # 1\nTraceback:\n  raise\n"
        "adaptive_platform.sweeps.trial.TrialFailedError: worker 0: loss is not finite\n"
    )
    assert row_of(trial("ERROR", error=str(error)), "/s").message == "worker 0: loss is not finite"
    run = tmp_path / "trials" / "00003"
    run.mkdir(parents=True)
    (run / "result.json").write_text(json.dumps({"message": "told by the run"}))
    assert row_of(trial("ERROR"), str(tmp_path)).message == "told by the run"


def rows() -> list[TrialRow]:
    drawn = [
        (0.01, "sgd"),
        (0.1, "lars"),
        (1.0, "sgd"),
        (0.3, "lars"),
        (0.03, "sgd"),
        (3.0, "lars"),
    ]
    scored = [
        TrialRow(
            trial=f"{at:05d}", status="done", accuracy=0.9 - 0.2 * abs(np.log10(lr / 0.1)),
            loss=0.5 + 0.1 * at, percent=100.0, step=10, samples=100, batch=32, lr=lr, seconds=5.0,
            fields={"optimizer.lr": lr, "optimizer.kind": kind},
        )
        for at, (lr, kind) in enumerate(drawn)
    ]  # fmt: skip
    failed = TrialRow(trial="00006", status="failed", fields={"optimizer.lr": 9.0}, message="boom")
    return [*scored, failed]


def test_the_best_trial_by_either_metric():
    best = best_of(rows(), "accuracy")
    assert best is not None
    assert best.trial == "00001"
    lowest = best_of(rows(), "loss")
    assert lowest is not None
    assert lowest.trial == "00000"
    assert best_of([row for row in rows() if row.status == "failed"], "loss") is None
    lucky = replace(rows()[0], status="failed", accuracy=1.0)
    assert best_of([*rows(), lucky], "accuracy") == best


@pytest.mark.parametrize("metric", ["accuracy", "loss"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_score_that_is_not_finite_is_none(metric, value):
    """Whatever its place: comparisons with NaN are all false, so the first row would win."""
    best = best_of(rows(), metric)
    diverged = replace(rows()[0], trial="diverged", **{metric: value})
    assert best_of([diverged, *rows()], metric) == best
    assert best_of([diverged], metric) is None


def test_an_accuracy_beside_a_lost_loss_does_not_win():
    lucky = replace(rows()[0], trial="lucky", accuracy=1.0, loss=float("inf"))
    best = best_of([lucky, *rows()], "accuracy")
    assert best is not None
    assert best.trial == "00001"


def test_the_page_ranks_what_has_no_finite_score_with_the_unscored():
    diverged = replace(rows()[0], trial="diverged", accuracy=float("nan"))
    text = render_page(load_sweep("warmup-lars"), [diverged, *rows()], "")
    assert "<b>00001</b>" in text
    assert "<b>diverged</b>" not in text
    assert text.index("00005") < text.index("diverged")


def test_the_table_is_read_back_with_pandas(tmp_path):
    table = frame(rows(), "accuracy")
    assert table.trial.tolist()[0] == "00001"
    assert table.trial.tolist()[-1] == "00006"
    path = write_table(table, str(tmp_path))
    read = pd.read_parquet(path)
    assert read["optimizer.lr"].tolist() == table["optimizer.lr"].tolist()
    assert read["message"].tolist()[-1] == "boom"
    assert read["optimizer.kind"].isna().sum() == 1


def test_mixed_values_in_a_column_can_be_written(tmp_path):
    mixed = [
        replace(rows()[at], fields={"x": value, "y": [1, at]})
        for at, value in enumerate((1, "auto", None))
    ]
    read = pd.read_parquet(write_table(frame(mixed, "accuracy"), str(tmp_path)))
    assert sorted(map(str, read["x"])) == ["1", "auto", "nan"]
    assert sorted(read["y"]) == ["[1, 0]", "[1, 1]", "[1, 2]"]


def test_importance_finds_the_field_that_matters():
    generator = np.random.default_rng(0)
    fields = [
        {"lr": float(10 ** generator.uniform(-3, 0)), "kind": str(generator.choice(["a", "b"]))}
        for _ in range(40)
    ]
    found = importance(fields, [abs(np.log10(drawn["lr"]) + 1.5) for drawn in fields])
    assert list(found) == ["lr", "kind"]
    assert found["lr"] > 0.9
    assert sum(found.values()) == pytest.approx(1.0)
    by_kind = importance(fields, [float(drawn["kind"] == "a") for drawn in fields])
    assert next(iter(by_kind)) == "kind"


def test_importance_of_conditional_and_constant_fields():
    fields = [{"on": True, "x": float(at)} if at % 2 else {"on": False, "c": 1} for at in range(12)]
    found = importance(fields, [float("x" in drawn) for drawn in fields])
    assert found["c"] + found["on"] + found["x"] == pytest.approx(1.0)


def test_importance_says_nothing_on_thin_ground():
    few = [{"x": 0.1 * at} for at in range(5)]
    assert importance(few, [1.0, 2.0, 3.0, 4.0, 5.0]) == {}
    assert importance([{"x": float(at)} for at in range(9)], [1.0] * 9) == {}
    assert importance([{"x": 1}] * 9, list(range(9))) == {}


def test_the_page_shows_everything_and_loads_nothing(tmp_path):
    write_run(tmp_path / "run", steps=50)
    made = [replace(row, run_dir=str(tmp_path / "run")) for row in rows()]
    sweep = load_sweep("warmup-lars")
    text = render_page(sweep, made, "name: best <recipe>\n")
    assert "<b>00001</b>" in text
    assert "boom" in text
    assert "name: best &lt;recipe&gt;" in text
    (payload,) = re.findall(r'id="figures">(.*?)</script>', text, re.S)
    figures = json.loads(payload)
    assert set(figures) == {"coordinates", "importance", "curves"}
    coordinates = figures["coordinates"]
    assert coordinates["layout"]["xaxis"]["ticktext"] == ["<b>optimizer.lr</b>", "<b>accuracy</b>"]
    assert len(coordinates["data"]) == 6
    best = coordinates["data"][-1]
    assert best["name"] == "00001"
    assert best["y"][-1] == 1.0
    assert len(figures["curves"]["data"]) == 6
    own = text.replace(get_plotlyjs(), "")  # the library names addresses that it never loads
    assert not re.search(r"(src|href)=", own)
    assert len(text.encode()) < 6e6


def test_a_page_without_any_score():
    sweep = load_sweep("warmup-lars")
    text = render_page(sweep, [row for row in rows() if row.status == "failed"], "")
    assert "No trial has a score." in text
    assert 'class="nothing"' in text
