"""Reports in a real browser: every plot is drawn, the console stays silent, nothing is loaded."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image
from report_examples import write_run

from adaptive_platform.report.html import write_html
from adaptive_platform.report.run_data import read_run
from adaptive_platform.sweeps.config import load_sweep
from adaptive_platform.sweeps.page import render_page
from adaptive_platform.sweeps.results import TrialRow


class Shown:
    """A page as the browser shows it: its document after the scripts, picture and console."""

    def __init__(self, browser: str, page: Path) -> None:
        picture = page.with_suffix(".png")
        words = [
            browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            f"--user-data-dir={page.parent / 'profile'}", "--window-size=1300,4000",
            "--virtual-time-budget=8000", "--enable-logging=stderr", "--v=0",
        ]  # fmt: skip
        shot = self._run([*words, "--dump-dom", f"--screenshot={picture}", page.as_uri()])
        self.console = [
            line
            for line in shot.stderr.splitlines()
            if "CONSOLE" in line or "Refused" in line or "ERR_" in line
        ]
        self.pixels = np.asarray(Image.open(picture).convert("RGB")).astype(int)
        self.document = shot.stdout

    @staticmethod
    def _run(words: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(words, capture_output=True, text=True, check=True, timeout=120)

    def drawn(self) -> dict[str, int]:
        """Strokes, bars and areas in each plot, by its id."""
        found = {}
        for part in re.split(r'<div class="plot(?: [^"]*)?" id="', self.document)[1:]:
            name, section = part.split('"')[0], part.split("</section>")[0]
            found[name] = len(re.findall(r'class="(?:js-line|js-fill|point|bars)', section))
        return found

    def coloured(self) -> float:
        """Share of the picture that has a colour, which words and frames have not."""
        spread = self.pixels.max(axis=2) - self.pixels.min(axis=2)
        return float((spread > 60).mean())


def test_report_of_one_run_and_of_several(chromium, tmp_path):
    for name, seed in (("first", 0), ("second", 1)):
        write_run(tmp_path / name, seed=seed, name=name)
    runs = [read_run(tmp_path / name) for name in ("first", "second")]
    for shown in (runs[:1], runs):
        page = tmp_path / f"report-{len(shown)}.html"
        write_html(shown, page)
        assert page.stat().st_size < 6e6
        seen = Shown(chromium, page)
        assert seen.console == []
        drawn = seen.drawn()
        assert len(drawn) >= 10
        assert all(drawn.values()), drawn
        assert seen.coloured() > 0.001


def test_page_of_a_sweep(chromium, tmp_path):
    write_run(tmp_path / "run", steps=60)
    row = TrialRow(
        trial="0", status="done", accuracy=0.5, loss=1.0, percent=100.0, step=60, samples=100,
        batch=32, lr=0.1, seconds=3.0, run_dir=str(tmp_path / "run"),
    )  # fmt: skip
    rows = [
        replace(row, trial=str(at), accuracy=0.5 + at / 20, fields={"optimizer.lr": 0.1 * (at + 1)})
        for at in range(8)
    ]
    page = tmp_path / "sweep.html"
    page.write_text(render_page(load_sweep("warmup-lars"), rows, "name: best\n"))
    assert page.stat().st_size < 6e6
    seen = Shown(chromium, page)
    assert seen.console == []
    drawn = seen.drawn()
    assert set(drawn) == {"coordinates", "importance", "curves"}
    assert all(drawn.values()), drawn
    assert seen.coloured() > 0.001


def test_a_page_with_a_fault_is_noticed(chromium, tmp_path):
    """The test above can fail: an error in a script and an empty plot are seen."""
    page = tmp_path / "bad.html"
    page.write_text(
        '<body><section><div class="plot" id="empty"></div></section>'
        "<script>throw new Error('boom')</script></body>"
    )
    seen = Shown(chromium, page)
    assert any("boom" in line for line in seen.console)
    assert seen.drawn() == {"empty": 0}
    assert seen.coloured() == 0.0
