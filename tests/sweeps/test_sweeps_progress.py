"""What people see of a sweep: lines as trials begin and end, a live table, why it stands still."""

from __future__ import annotations

import io
from types import SimpleNamespace

from rich.console import Console

from adaptive_platform.sweeps import progress
from adaptive_platform.sweeps.progress import Progress


def trial(name="ab_00000", status="RUNNING", error="", **last):
    fields = {"optimizer.lr": 0.12345, "optimizer.kind": "lars"}
    return SimpleNamespace(
        trial_id=name, status=status, last_result=last, error_file=error,
        config={"fields": fields, "dir": "/s"},
    )  # fmt: skip


def shown(terminal: bool, free: str = "") -> tuple[Progress, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=160)
    return Progress(console, "/s", "accuracy", 4, lambda: free), out


def test_lines_say_what_began_and_how_it_ended():
    seen, out = shown(terminal=False)
    seen.on_trial_start(1, [], trial())
    done = {"accuracy": 0.5, "loss": 1.25, "percent": 100.0, "seconds": 4.0}
    seen.on_trial_complete(1, [], trial(status="TERMINATED", ended="done", **done))
    seen.on_trial_complete(1, [], trial("ab_00001", "TERMINATED", **{**done, "percent": 25.0}))
    seen.close()
    lines = out.getvalue().splitlines()
    assert lines == [
        "trial 00000 begins: optimizer.lr=0.123 optimizer.kind=lars",
        "trial 00000 done: accuracy 50.0 %, loss 1.25 in 4.0 s",
        "trial 00001 stopped early at 25 %: accuracy 50.0 %, loss 1.25 in 4.0 s",
    ]


def test_the_table_shows_who_runs_and_marks_the_best(monkeypatch):
    monkeypatch.setattr(progress, "_REFRESH_SECONDS", 0.0)
    seen, out = shown(terminal=True)
    trials = [
        trial("ab_00000", accuracy=0.25, percent=50.0),
        trial("ab_00001", "TERMINATED", ended="done", accuracy=0.75, percent=100.0),
        trial("ab_00002", "PENDING"),
    ]
    seen.on_step_end(1, trials)
    seen.close()
    text = out.getvalue()
    assert "1 of 4 trials ended" in text
    assert "00001*" in text
    assert "00000*" not in text
    assert "75.0 %" in text
    assert "00002" not in text


def test_trials_that_get_no_resources_are_told_once(monkeypatch):
    monkeypatch.setattr(progress, "_REFRESH_SECONDS", 0.0)
    monkeypatch.setattr(progress, "_WAIT_SECONDS", -1.0)
    seen, out = shown(terminal=False, free="2 CPU asked, 1 free")
    waiting = trial()
    seen.on_trial_start(1, [waiting], waiting)
    seen.on_step_end(1, [waiting])
    seen.on_step_end(2, [waiting])
    assert out.getvalue().count("1 trial(s) wait for resources: 2 CPU asked, 1 free") == 1


def test_a_closed_terminal_costs_the_sweep_nothing():
    seen, out = shown(terminal=False)
    out.close()
    seen.on_trial_start(1, [], trial())
    seen.close()
