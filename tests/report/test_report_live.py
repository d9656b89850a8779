from __future__ import annotations

import io
import re
from dataclasses import asdict

import pytest
from report_examples import step_record
from rich.console import Console

from adaptive_platform.report.live import LiveLine


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def decision(old: int, new: int) -> dict[str, object]:
    return {"step": 7, "old_batch": old, "new_batch": new, "reason": "noise [red]scale[/red]"}


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_without_a_terminal_lines_come_now_and_then() -> None:
    out, clock = io.StringIO(), Clock()
    line = LiveLine(Console(file=out, width=80), "2 epochs", every_seconds=10.0, clock=clock)
    for step in range(1, 31):
        line.step(asdict(step_record(step)), step / 100)
        clock.now += 1.0
    told = out.getvalue().splitlines()
    assert [re.findall(r"step (\d+)", text) for text in told] == [["1"], ["11"], ["21"]]
    line.close()
    assert "step 30" in out.getvalue().splitlines()[-1]
    assert "\x1b" not in out.getvalue()
    assert told[2].startswith("21 % of 2 epochs")


def test_the_last_step_is_not_told_twice() -> None:
    out = io.StringIO()
    line = LiveLine(Console(file=out, width=80))
    line.step(asdict(step_record(1)), 1.0)
    line.close()
    line.close()
    assert len(out.getvalue().splitlines()) == 1


def test_time_left_follows_the_speed_of_the_last_minute() -> None:
    out, clock = io.StringIO(), Clock()
    line = LiveLine(Console(file=out, width=80), every_seconds=0.0, clock=clock)
    line.step(asdict(step_record(1)), 0.0)
    assert "left" not in out.getvalue()
    clock.now += 1000.0  # slow start: 10 % in 1000 s
    line.step(asdict(step_record(2)), 0.1)
    for step in range(3, 13):  # then 1 % in 10 s
        clock.now += 10.0
        line.step(asdict(step_record(step)), 0.1 + 0.01 * (step - 2))
    assert out.getvalue().splitlines()[-1].endswith("13 min 20 s left")  # 80 % at 10 s each


def test_on_a_terminal_one_line_is_redrawn_and_news_stay_above() -> None:
    out, clock = io.StringIO(), Clock()
    console = Console(file=out, force_terminal=True, width=70, color_system=None)
    line = LiveLine(console, "2 epochs", clock=clock)
    for step in range(1, 6):
        line.step(asdict(step_record(step)), step / 10)
        clock.now += 1.0
        if step == 3:
            line.decision(decision(32, 64))
            line.evaluation({"step": 3, "loss": 0.5, "accuracy": 0.9, "samples": 360})
            line.event({"step": 3, "kind": "resize", "text": "2 to 1 workers"})
    line.close()
    told = out.getvalue()
    assert "\x1b[2K" in told  # lines are erased in place
    news = plain(told).index("batch 32 → 64 (noise [red]scale[/red])")
    assert news < plain(told).rindex("step 5")
    assert "held-out accuracy 90.0 %, loss 0.500 on 360 samples" in plain(told)
    assert "resize: 2 to 1 workers" in plain(told)
    assert all(len(text) <= 70 for text in re.split(r"[\r\n]", plain(told)) if "loss 2" in text)


def test_on_a_terminal_redraws_are_bounded() -> None:
    out, clock = io.StringIO(), Clock()
    console = Console(file=out, force_terminal=True, width=70, color_system=None)
    line = LiveLine(console, clock=clock)
    for step in range(1, 1001):
        line.step(asdict(step_record(step)), step / 1000)
        clock.now += 0.001
    shown = len(re.findall(r"step [\d,]+", plain(out.getvalue())))
    line.close()
    assert 8 <= shown <= 11
    assert "step 1,000" in plain(out.getvalue())


@pytest.mark.parametrize("terminal", [True, False])
def test_decisions_that_hold_are_left_to_the_journal(terminal: bool) -> None:
    out = io.StringIO()
    line = LiveLine(Console(file=out, force_terminal=terminal, width=80))
    line.decision(decision(32, 32))
    line.close()
    assert out.getvalue() == ""


def test_a_console_that_knows_only_ascii_does_not_end_the_run() -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    line = LiveLine(Console(file=out, width=80))
    line.decision(decision(32, 64))
    line.close()
    out.seek(0)
    assert "batch 32 ? 64" in out.read()
