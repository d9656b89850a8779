from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_examples import step_record

from adaptive_platform.report import RunResult
from adaptive_platform.report.wording import (
    duration,
    format_decision,
    format_evaluation,
    format_event,
    format_step,
    number,
    percent,
    summary_lines,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"), (0.02, "0.0200"), (0.412345, "0.412"), (97.36, "97.4"), (811.7, "812"),
        (1234.5, "1,234"), (-2.5, "-2.50"), (3.2e-7, "3.20e-07"), (4e9, "4.00e+09"),
        (math.nan, "–"), (math.inf, "–"), (None, "–"), ("word", "–"),
    ],
)  # fmt: skip
def test_numbers(value: Any, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (4.2, "4.2 s"), (59.97, "1 min 00 s"), (185.2, "3 min 05 s"), (7800, "2 h 10 min"),
        (3 * 86400 + 4 * 3600, "3 d 04 h"), (-1, "–"), (None, "–"), (math.inf, "–"),
    ],
)  # fmt: skip
def test_durations(seconds: Any, text: str) -> None:
    assert duration(seconds) == text


def test_percent() -> None:
    assert (percent(0.9736), percent(None), percent(math.nan)) == ("97.4 %", "–", "–")


def test_a_step_tells_everything_where_there_is_room() -> None:
    row = asdict(
        step_record(
            1234, epoch=2, loss=0.4123, accuracy=0.881, global_batch=256, lr=0.0213,
            noise_scale=811.7, samples_per_second=1240.0,
        )
    )  # fmt: skip
    assert format_step(row, 0.4267, "5 epochs", 151.0) == (
        "42 % of 5 epochs  epoch 3  step 1,234  loss 0.412  acc 88.1 %  batch 256  lr 0.0213  "
        "noise 812  1,240 img/s  2 min 31 s left"
    )


@given(width=st.integers(1, 160))
def test_a_step_fits_the_line_and_keeps_what_matters(width: int) -> None:
    row = asdict(step_record(1234, accuracy=0.5, noise_scale=10.0))
    text = format_step(row, 0.5, "5 epochs", 10.0, width)
    assert len(text) <= width
    if width >= 24:
        assert "step 1,234" in text
        assert "loss" in text


def test_a_step_leaves_out_what_is_not_known() -> None:
    row = asdict(step_record(3, loss=math.nan, skipped=True, samples_per_second=math.nan))
    assert format_step(row) == "epoch 1  step 3 skipped  loss –  batch 32  lr 0.100"
    assert format_step({"step": 3}) == "step 3  loss –  batch –"


def test_news_are_single_lines() -> None:
    row: dict[str, Any] = {
        "step": 1200,
        "old_batch": 32,
        "new_batch": 64,
        "reason": "noise\n is 90",
    }
    assert format_decision(row) == "step 1,200: batch 32 → 64 (noise is 90)"
    assert format_decision({**row, "new_batch": 32}) == "step 1,200: batch stays 32 (noise is 90)"
    score = {"step": 9, "loss": 0.25, "accuracy": None, "samples": 1000, "broken": 2, "seconds": 3}
    assert format_evaluation(score) == (
        "step 9: held-out loss 0.250 on 1,000 samples, 2 broken left out in 3.0 s"
    )
    event = {"step": 4, "kind": "broken_sample", "text": "a.jpg\nis cut short"}
    assert format_event(event) == "step 4: broken sample: a.jpg is cut short"


def test_summary_says_how_it_ended_how_good_how_long_and_where() -> None:
    result = RunResult(
        status="done", exit_code=0, accuracy=0.9611, loss=0.131, steps=123, samples=5748,
        epochs=4.0, seconds=151.0, startup_seconds={"ray": 3.0, "first_step": 2.5}, decisions=2,
        initial_batch=32, final_batch=128, outputs={"report": "runs/a/report.html"},
        skipped_steps=1, broken_samples=2,
    )  # fmt: skip
    assert summary_lines(asdict(result), "runs/a") == [
        "Done",
        "  held-out  accuracy 96.1 %, loss 0.131",
        "  trained   4.00 epochs, 123 steps, 5,748 samples, 1 step skipped, "
        "2 broken samples left out",
        "  batch     32 → 128 in 2 decisions",
        "  time      2 min 31 s, of which start to first step 5.5 s (ray 3.0 s, first step 2.5 s)",
        "  run       runs/a",
        "  report    runs/a/report.html",
    ]


def test_summary_of_a_stopped_run_says_how_to_go_on() -> None:
    result = RunResult(status="interrupted", exit_code=143, message="SIGTERM at step 7")
    lines = summary_lines(asdict(result), "runs/a")
    assert lines[0] == "Interrupted: SIGTERM at step 7"
    assert lines[-1].endswith("adaptive-platform train resume=runs/a")
    assert not any("held-out" in line for line in lines)
