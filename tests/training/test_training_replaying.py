"""Replaying a recorded run: its own controller comes out the same, others by their own rules."""

from __future__ import annotations

import pytest
from runs import Points, recipe, train

from adaptive_platform.errors import UserError
from adaptive_platform.report.journal import Journal
from adaptive_platform.report.run_data import read_run
from adaptive_platform.training.replaying import replay_run

NOISE = {
    "kind": "noise_scale",
    "global_batch": 8,
    "max_batch": 64,
    "decide_every": "16 samples",
    "min_observations": 2,
}


ADASCALE = {"kind": "adascale", "clock": "samples"}


def recorded(tmp_path, *overrides, batch=NOISE, rule=ADASCALE, **content):
    config = recipe("stop.epochs=2", *overrides, batch=batch, lr_rule=rule, **content)
    outcome = train(
        config, world_size=2, data=Points(200), seconds_of=lambda b: 0.5 + 0.01 * b
    )[0]  # fmt: skip
    journal = Journal(tmp_path / "run")
    for record in outcome.watcher.steps:
        journal.step(record)
    for record in outcome.watcher.decisions:
        journal.decision(record)
    journal.flush()
    (tmp_path / "run" / "recipe.yaml").write_text(config.to_yaml())
    return tmp_path / "run", outcome


def test_the_runs_own_controller_comes_out_as_it_was(tmp_path):
    run_dir, outcome = recorded(tmp_path)
    found = replay_run(run_dir, "noise_scale")
    own = [r.global_batch for r in outcome.watcher.steps]
    assert list(found.replayed.batches) == own
    assert len(set(own)) > 2
    changes = [d for d in outcome.watcher.decisions if d.new_batch != d.old_batch]
    told = [line for line in found.lines() if line.startswith("step ")]
    assert len(told) == len(changes)
    assert f"batch 8 -> {changes[0].new_batch} (noise scale" in told[0]
    assert f"step {changes[0].step}, " in told[0]


@pytest.mark.parametrize(
    "rule",
    [
        ADASCALE | {"max_factor": 1.2},
        ADASCALE | {"max_factor": 1.1, "exponent": 0.5},
        {"kind": "linear", "max_factor": 1.2},
    ],
)
def test_a_capped_rule_counts_in_the_replay_as_in_the_run(tmp_path, rule):
    run_dir, outcome = recorded(tmp_path, rule=rule)
    steps = outcome.watcher.steps
    assert max(record.gain for record in steps) > 1.25
    found = replay_run(run_dir, "noise_scale")
    assert list(found.replayed.batches) == [record.global_batch for record in steps]
    before = [0.0, *(record.scale_invariant_step for record in steps[:-1])]
    assert list(found.replayed.learned) == pytest.approx(before)


def test_steps_samples_and_time_of_another(tmp_path):
    """Time by the model of the run: 0.5 s and 0.01 s for each sample of a worker's share."""
    run_dir, outcome = recorded(tmp_path)
    found = replay_run(run_dir, "fixed", ["global_batch=8"])
    run, by_model, fixed = found.courses
    assert run.steps == len(outcome.watcher.steps)
    assert run.samples == fixed.samples - (fixed.samples - 400) == 400
    assert fixed.changes == 0
    assert fixed.final_batch == 8
    assert fixed.steps == pytest.approx(found.learned, abs=1)
    assert fixed.seconds == pytest.approx(fixed.steps * 0.54, rel=0.05)
    assert by_model.seconds == pytest.approx(run.seconds, rel=0.05)
    assert found.throughput.fit_error < 0.05
    assert any("mean error" in line for line in found.lines())


def test_fields_carry_over_and_can_be_set(tmp_path):
    run_dir, _ = recorded(tmp_path)
    bound = replay_run(run_dir, "noise_scale", ["max_batch=12"])
    assert max(bound.replayed.batches) == 12
    staged = replay_run(run_dir, "schedule", ["stages=[{at: 1 epochs, batch: 50}]"])
    assert staged.replayed.batches[0] == 8
    assert staged.replayed.batches[-2] == 50


def test_what_is_wrong_is_said(tmp_path):
    run_dir, _ = recorded(tmp_path, "statistics.layers=false")
    for controller, words, message in (
        ("nois", [], "--controller = nois: must be one of .*noise_scale"),
        ("noise_scale", ["max_batc=3"], "max_batc: there is no such field.*max_batch"),
        ("noise_scale", ["max_batch=3"], "global_batch 8 must lie between"),
        ("gsnr", [], "needs layers, but .*`gsnr`.*statistics.layers=false"),
        ("abs", [], "needs hessian, but .*batch.kind=abs"),
        ("schedule", [], "stages is missing"),
    ):
        with pytest.raises(UserError, match=message):
            replay_run(run_dir, controller, words)


def test_layers_and_curvature_are_replayed_from_their_columns(tmp_path):
    run_dir, _ = recorded(tmp_path / "a")
    assert len(replay_run(run_dir, "gsnr").replayed.decisions) > 2
    run_dir, _ = recorded(
        tmp_path / "b", batch={"kind": "abs", "global_batch": 8, "duration_epochs": 1}
    )
    changed = [d for _, d in replay_run(run_dir, "abs").replayed.decisions if d.changed]
    assert changed
    assert changed[0].inputs["hessian_top_eigenvalue"] is not None


def test_records_written_before_the_columns_existed_are_read(tmp_path):
    """An old part lacks the new columns: read as empty, and replayed as far as that goes."""
    import pyarrow.parquet as pq

    run_dir, _ = recorded(tmp_path)
    new = ["noise_trace", "signal_sqnorm", "biased", "hessian_top_eigenvalue"]
    for part in (run_dir / "steps").glob("*.parquet"):
        pq.write_table(pq.read_table(part).drop_columns(new), part)
    steps = read_run(run_dir).steps
    assert bool(steps[new].isna().all().all())
    assert replay_run(run_dir, "fixed").courses[-1].steps > 0
    with pytest.raises(UserError, match=r"needs noise, but .*`noise_trace`"):
        replay_run(run_dir, "noise_scale")


def test_a_run_without_a_step_has_nothing_to_replay(tmp_path):
    Journal(tmp_path / "run")
    (tmp_path / "run" / "recipe.yaml").write_text(recipe().to_yaml())
    with pytest.raises(UserError, match="no committed step"):
        replay_run(tmp_path / "run", "fixed")


def test_the_command_prints_decisions_and_the_table(tmp_path):
    from typer.testing import CliRunner

    from adaptive_platform.cli import app

    run_dir, _ = recorded(tmp_path)
    words = ["replay", str(run_dir), "--controller", "noise_scale", "--set", "max_batch=16"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "batch 8 -> " in result.output
    assert "noise_scale, replayed" in result.output
    assert "run, recorded" in result.output


def test_the_picture_holds_both_courses(tmp_path):
    run_dir, outcome = recorded(tmp_path)
    batch, steps, samples, seconds = replay_run(run_dir, "fixed", ["global_batch=8"]).plots
    own, other = batch.lines
    taken = [record.global_batch for record in outcome.watcher.steps]
    assert set(own.y) <= set(taken)
    assert max(own.y) == max(taken)
    assert set(other.y) == {8}
    assert other.x[1] - other.x[0] == pytest.approx(1.0)
    assert steps.lines[1].y[-1] > steps.lines[0].y[-1]
    assert samples.lines[0].y[-1] == 400
    assert seconds.lines[0].y[-1] == pytest.approx(
        sum(record.step_seconds for record in outcome.watcher.steps)
    )


@pytest.mark.parametrize("ending", ["html", "png"])
def test_the_command_draws(tmp_path, ending):
    from typer.testing import CliRunner

    from adaptive_platform.cli import app

    run_dir, _ = recorded(tmp_path)
    target = tmp_path / f"replay.{ending}"
    words = ["replay", str(run_dir), "--controller", "fixed", "--out", str(target)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    content = target.read_bytes()
    assert content.startswith(b"\x89PNG" if ending == "png" else b"<!doctype html>")
    if ending == "html":
        assert b"fixed, replayed" in content
    with pytest.raises(UserError, match=r"--out = x.pdf: must end in .html or .png"):
        CliRunner().invoke(app, [*words[:-1], "x.pdf"], catch_exceptions=False)


def test_changes_are_recorded_with_what_they_should_bring(tmp_path):
    """The gain of the noise that the step before recorded; time by the splits seen until then."""
    _, outcome = recorded(tmp_path)
    steps = {record.step: record for record in outcome.watcher.steps}
    changes = [d for d in outcome.watcher.decisions if d.new_batch != d.old_batch]
    assert changes
    for change in changes:
        told = steps[change.step]
        noise, signal = max(told.noise_trace, 0.0), max(told.signal_sqnorm, 0.0)
        if signal > 0.0:
            expected = (noise / change.old_batch + signal) / (noise / change.new_batch + signal)
            assert change.predicted_gain == pytest.approx(expected)
        assert (change.predicted_slowdown > 1.0) == (change.new_batch > change.old_batch)
    last = changes[-1]  # several splits were seen by then, and time is linear in the share
    before, after = (0.5 + 0.01 * -(-b // 2) for b in (last.old_batch, last.new_batch))
    assert last.predicted_slowdown == pytest.approx(after / before, rel=0.1)
    held = [d for d in outcome.watcher.decisions if d.new_batch == d.old_batch]
    assert all(d.predicted_gain is None and d.predicted_slowdown is None for d in held)
