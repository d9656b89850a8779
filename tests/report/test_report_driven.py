"""Pages under a real pointer: hover tells, dragging zooms all panels, buttons change the axis."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from driven_browser import DrivenBrowser
from report_examples import write_run

from adaptive_platform.report.html import write_html
from adaptive_platform.report.run_data import read_run
from adaptive_platform.sweeps.config import load_sweep
from adaptive_platform.sweeps.page import render_page
from adaptive_platform.sweeps.results import TrialRow

READY = "[...document.querySelectorAll('.plot')].every(plot => plot.querySelector('.nsewdrag'))"
RANGES = (
    "Object.fromEntries([...document.querySelectorAll('.plot')]"
    ".map(plot => [plot.id, plot.layout.xaxis.range.map(Number)]))"
)


@pytest.fixture(scope="module")
def browser(chromedriver, chromium, tmp_path_factory):
    made = DrivenBrowser(chromedriver, chromium, tmp_path_factory.mktemp("browser"))
    yield made
    made.close()


@pytest.fixture
def report(browser, tmp_path):
    """The report of one run, drawn."""
    write_run(tmp_path / "first")
    page = tmp_path / "report.html"
    write_html([read_run(tmp_path / "first")], page)
    browser.console()
    browser.open(page)
    browser.wait(READY)
    yield browser
    assert browser.console() == []


def told(browser: DrivenBrowser, plot: str) -> str:
    """The words that plotly shows beside the pointer."""
    words = f"document.querySelector('#{plot} .hoverlayer').textContent"
    return browser.wait(words)


def test_hovering_a_decision_tells_the_batch_and_the_reason(report):
    x, y, width, height = report.place("#batch .scatterlayer .points path")
    assert report.ask("document.querySelector('#batch .hoverlayer').textContent") == ""
    report.point_at(x + width / 2, y + height / 2)
    words = told(report, "batch")
    assert "32 → 64 at step" in words
    assert "noise scale" in words


def test_hovering_a_curve_tells_value_and_position(report):
    left, top, _, _ = report.place("#throughput .nsewdrag")
    plot = "document.getElementById('throughput')"
    number, x, y = report.ask(
        f"(({{data, _fullLayout}}) => {{const curve = data.at(-1); const at = curve.y.length >> 1;"
        "return [curve.y[at], _fullLayout.xaxis.d2p(curve.x[at]),"
        f" _fullLayout.yaxis.d2p(curve.y[at])]}})({plot})"
    )
    report.point_at(left + x, top + y)
    words = told(report, "throughput")
    assert words.endswith("samples seen")
    assert float(re.match(r"[\d.]+?\d{2}", words)[0]) == pytest.approx(number, rel=0.1)


def test_hovering_an_accuracy_tells_a_share(report):
    x, y, width, height = report.place("#accuracy .scatterlayer .points path")
    report.point_at(x + width / 2, y + height / 2)
    assert re.search(r"held-out\d+\.\d%\d+ samples seen", told(report, "accuracy"))


def test_dragging_zooms_every_panel_and_a_double_click_goes_back(report):
    before = report.ask(RANGES)
    curve = "document.querySelector('#lr .js-line').getAttribute('d')"
    stroke = report.ask(curve)
    x, y, width, height = report.place("#loss .nsewdrag")
    report.drag((x + 0.3 * width, y + 0.2 * height), (x + 0.6 * width, y + 0.8 * height))
    after = report.wait(RANGES, lambda now: all(now[name] != before[name] for name in now))
    low, high = before["loss"]
    wanted = [low + 0.3 * (high - low), low + 0.6 * (high - low)]
    for name, shown in after.items():
        assert shown == pytest.approx(wanted, rel=0.02), name
    assert report.ask(curve) != stroke, "the range moved, and the curve was not drawn again"
    x, y, width, height = report.place("#lr .nsewdrag")
    report.double_click(x + width / 2, y + height / 2)
    again = report.wait(RANGES, lambda now: all(now[name] != after[name] for name in now))
    for name, shown in again.items():
        assert shown == pytest.approx(before[name], abs=0.02 * (high - low)), name


def test_a_button_changes_the_axis_of_every_panel(report):
    buttons = report.ask("[...document.querySelectorAll('.axis button')].map(b => b.dataset.axis)")
    titles = "[...document.querySelectorAll('.plot .xtitle')].map(title => title.textContent)"
    positions = "document.getElementById('lr').data[0].x"
    before, drawn = report.ask(positions), set()
    for axis in buttons[1:]:
        report.click(f".axis button[data-axis={axis}]")
        (title,) = report.wait(f"[...new Set({titles})]", lambda now: len(now) == 1)
        pressed = "document.querySelector('.axis button[aria-pressed=true]').dataset.axis"
        assert report.ask(pressed) == axis
        drawn.add(title)
        moved = report.ask(positions)
        assert len(moved) == len(before)
        assert moved != before
    assert len(drawn) == len(buttons) - 1


def test_clicking_a_name_hides_its_curve_among_several_runs(browser, tmp_path):
    for name, seed in (("first", 0), ("second", 1)):
        write_run(tmp_path / name, seed=seed, name=name)
    page = tmp_path / "report.html"
    write_html([read_run(tmp_path / name) for name in ("first", "second")], page)
    browser.console()
    browser.open(page)
    browser.wait(READY)
    curves = "document.querySelectorAll('#lr .js-line').length"
    both = browser.ask(curves)
    browser.click("#lr .legend .traces:first-of-type .legendtoggle")
    assert browser.wait(curves, lambda now: now < both) == both - 1
    x, y, width, height = browser.place("#batch .scatterlayer .points path")
    browser.point_at(x + width / 2, y + height / 2)
    assert re.match(r"(first|second)32 → 64 at step", told(browser, "batch"))
    assert browser.console() == []


def test_hovering_a_trial_of_a_sweep_tells_its_fields(browser, tmp_path):
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
    browser.console()
    browser.open(page)
    browser.wait(READY)
    x, y, width, height = browser.place("#importance .bars path")
    browser.point_at(x + width / 2, y + height / 2)
    assert "optimizer.lr: 100%" in told(browser, "importance")
    x, y, width, height = browser.place("#coordinates .nsewdrag")
    browser.point_at(x + 0.15 / (2 - 0.7) * width, y + height / 1.1 * 0.05)
    words = told(browser, "coordinates")
    assert "optimizer.lr=0.8" in words
    assert "accuracy 0.85" in words
    assert browser.console() == []
