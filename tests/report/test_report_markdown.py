from __future__ import annotations

from pathlib import Path

import pytest
from report_examples import write_run

from adaptive_platform.errors import UserError
from adaptive_platform.report import Journal
from adaptive_platform.report.markdown import render_markdown
from adaptive_platform.report.run_data import read_run


def test_runs_stand_side_by_side(tmp_path: Path) -> None:
    write_run(tmp_path / "first", steps=120)
    write_run(tmp_path / "se|c<b>ond", steps=80, seed=3)
    text = render_markdown([read_run(tmp_path / "first"), read_run(tmp_path / "se|c<b>ond")])
    lines = text.splitlines()
    assert lines[0] == r"|  | first | se\|c&lt;b>ond |"
    assert "| steps | 120 | 80 |" in lines
    assert "| `seed` | 0 | 3 |" in lines
    assert any(line.startswith("**first.** The run ended after 120 steps") for line in lines)
    assert sum(line.startswith("- step ") and "→" in line for line in lines) >= 4


def test_a_run_without_steps_has_a_text(tmp_path: Path) -> None:
    Journal(tmp_path)
    assert "The run is still going on, or was killed" in render_markdown([read_run(tmp_path)])


def test_no_run_is_an_error() -> None:
    with pytest.raises(UserError, match="at least one run directory"):
        render_markdown([])
