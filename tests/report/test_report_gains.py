"""Expected and realised gains against runs whose noise and speed are known."""

from __future__ import annotations

import math

import pandas as pd
import pytest
from report_examples import step_record

from adaptive_platform.report.gains import against_first_batch, decision_gains
from adaptive_platform.report.headline import sentences
from adaptive_platform.report.html import render_html
from adaptive_platform.report.markdown import render_markdown
from adaptive_platform.report.run_data import RunData

NOISE, SIGNAL = 96.0, 1.0


def gain(new: float, old: float, noise: float = NOISE) -> float:
    return (noise / old + SIGNAL) / (noise / new + SIGNAL)


def run_of(*, noise: float | None = NOISE, skipped: bool = False) -> RunData:
    """40 steps at 32 of 1 s each, then 20 at 128 of 2 s each, all at one noise scale."""
    batches = [32] * 40 + [128] * 20
    steps = [
        step_record(
            step,
            samples_seen=sum(batches[:step]),
            global_batch=batch,
            noise_trace=noise,
            signal_sqnorm=None if noise is None else SIGNAL,
            step_seconds=1.0 if batch == 32 else 2.0,
        )
        for step, batch in enumerate(batches, start=1)
    ]
    if skipped:  # of another batch, other noise and a very long time: none of it may count
        steps.insert(
            45, step_record(46, global_batch=128, noise_trace=1e9, signal_sqnorm=1.0,
                            step_seconds=1e6, skipped=True, samples_seen=0),
        )  # fmt: skip
    decisions = [
        {"step": 10, "kind": "noise_scale", "old_batch": 32, "new_batch": 32, "reason": "hold"},
        {"step": 40, "kind": "noise_scale", "old_batch": 32, "new_batch": 128, "reason": "grow",
         "predicted_gain": 1.5, "predicted_slowdown": 3.0},
    ]  # fmt: skip
    return RunData(
        path="x",
        steps=pd.DataFrame([{f: getattr(s, f) for f in s.__dataclass_fields__} for s in steps]),
        decisions=pd.DataFrame(decisions),
    )


@pytest.mark.parametrize("skipped", [False, True])
def test_realised_costs_follow_from_the_noise_and_times_after_the_change(skipped: bool) -> None:
    (found,) = decision_gains(run_of(skipped=skipped))
    assert (found.step, found.old_batch, found.new_batch) == (40, 32, 128)
    assert found.predicted.steps == pytest.approx(1 / 1.5)
    assert found.predicted.samples == pytest.approx(4 / 1.5)
    assert found.predicted.seconds == pytest.approx(3 / 1.5)
    worth = gain(128, 32)
    assert found.realised.steps == pytest.approx(1 / worth)
    assert found.realised.samples == pytest.approx(4 / worth)
    assert found.realised.seconds == pytest.approx(2 / worth)


def test_the_whole_run_is_compared_with_staying_where_it_began() -> None:
    cost = against_first_batch(run_of())
    assert cost is not None
    needed = 40 + 20 * gain(128, 32)
    assert cost.steps == pytest.approx(60 / needed)
    assert cost.samples == pytest.approx((40 * 32 + 20 * 128) / (32 * needed))
    assert cost.seconds == pytest.approx((40 + 40) / needed)
    (told,) = [s for s in sentences(run_of()) if s.startswith("Against")]
    assert f"{100 * (1 - cost.steps):.1f} % fewer steps" in told
    assert f"{100 * (cost.samples - 1):.1f} % more samples" in told
    assert f"{100 * (1 - cost.seconds):.1f} % less time" in told


def test_without_noise_nothing_is_claimed() -> None:
    run = run_of(noise=None)
    assert against_first_batch(run) is None
    assert not [s for s in sentences(run) if s.startswith("Against")]
    (found,) = decision_gains(run)
    assert math.isnan(found.realised.steps)


def test_old_records_without_predictions_are_still_read() -> None:
    run = run_of()
    bare = run.decisions.drop(columns=["predicted_gain", "predicted_slowdown"])
    (found,) = decision_gains(RunData(path="x", steps=run.steps, decisions=bare))
    assert math.isnan(found.predicted.samples)
    assert math.isfinite(found.realised.samples)


def test_reports_set_expected_beside_realised() -> None:
    for text in (render_markdown([run_of()]), render_html([run_of()])):
        assert f"0.67 → {1 / gain(128, 32):.2g}" in text
        assert f"2.7 → {4 / gain(128, 32):.2g}" in text
