from __future__ import annotations

import struct
import sys
from pathlib import Path

import pytest
from report_examples import write_run

from adaptive_platform.errors import UserError
from adaptive_platform.report import Journal
from adaptive_platform.report.png import write_png
from adaptive_platform.report.run_data import read_run


def size_of(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def test_a_wide_picture_is_drawn(tmp_path: Path) -> None:
    for name in ("first", "cost $1 & $2"):
        write_run(tmp_path / name, steps=40)
    runs = [read_run(tmp_path / "first"), read_run(tmp_path / "cost $1 & $2")]
    write_png(runs, tmp_path / "runs.png")
    width, height = size_of(tmp_path / "runs.png")
    assert 1200 <= width <= 2400
    assert width > 1.5 * height


def test_a_run_without_steps_is_drawn(tmp_path: Path) -> None:
    Journal(tmp_path / "run")
    write_png([read_run(tmp_path / "run")], tmp_path / "empty.png")
    assert size_of(tmp_path / "empty.png")[0] > 0


def test_without_matplotlib_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Journal(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match=r"pip install adaptive-platform\[figures\]"):
        write_png([read_run(tmp_path)], tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()


def test_no_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="at least one run directory"):
        write_png([], tmp_path / "a.png")
