from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest
from report_examples import write_run

from adaptive_platform.errors import UserError
from adaptive_platform.report import Journal
from adaptive_platform.report.figures import panels
from adaptive_platform.report.html import render_html, write_html
from adaptive_platform.report.page import prose
from adaptive_platform.report.run_data import RunData, read_run

EVIL = "<script>alert('run')</script>"


class Page(HTMLParser):
    """Tags, addresses and visible text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] not in ("script", "style"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[RunData]:
    root = tmp_path_factory.mktemp("runs")
    write_run(root / "first", steps=120)
    write_run(root / "second", steps=80, seed=3, name=EVIL)
    return [read_run(root / "first"), read_run(root / "second")]


def payload(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', text, re.S)
    assert found
    return json.loads(found[1], parse_constant=pytest.fail)


def test_the_page_needs_no_network_and_forbids_it(tmp_path: Path, runs: list[RunData]) -> None:
    write_html(runs[:1], tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.addresses == []
    assert not {"link", "iframe", "img"} & set(page.tags)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy
    assert "default-src 'none'" in policy[1]
    assert "http" not in policy[1]
    assert "url(" not in re.search(r"<style>(.*?)</style>", text, re.S)[1]  # type: ignore[index]


def test_one_run_tells_its_story(runs: list[RunData]) -> None:
    text = Page(render_html(runs[:1])).text
    assert "The run ended after 120 steps" in text
    assert "97.0 % held-out accuracy" in text
    assert "1 step was skipped and 1 broken sample was left out." in text
    assert "is above 1.5 x the batch of 32: double it" in text
    assert "checkpoints/step-120, written in 0.4 s" in text
    assert "name: resnet50" in text


def test_every_panel_holds_the_runs_in_constant_colours(runs: list[RunData]) -> None:
    shown = payload(render_html(runs))["figures"]
    assert set(shown) == {
        "loss", "accuracy", "batch", "noise", "lr", "gain", "efficiency", "throughput", "time",
        "workers",
    }  # fmt: skip
    for name in ("loss", "batch", "noise", "lr", "gain", "efficiency", "throughput", "workers"):
        colours: dict[str, set[str]] = {"first": set(), "second": set()}
        for trace in shown[name]["data"]:
            label = trace["name"].split(":")[0]
            if trace["mode"] == "lines" and label in colours:
                colours[label].add(trace["line"]["color"])
        assert all(len(found) == 1 for found in colours.values()), name
        assert colours["first"] != colours["second"]


def test_plotly_accepts_every_figure(runs: list[RunData]) -> None:
    for shown in (runs[:1], runs):
        for panel in panels(shown):
            go.Figure(panel.figure)


def test_axes_have_units_and_every_trace_a_place_on_each(runs: list[RunData]) -> None:
    figures = payload(render_html(runs[:1]))["figures"]
    for name, figure in figures.items():
        assert figure["layout"]["yaxis"]["title"]["text"], name
        for trace in figure["data"]:
            for positions in trace["meta"]["axes"].values():
                assert len(positions) == len(trace["y"])
                assert None not in positions
    minutes = figures["lr"]["data"][0]["meta"]["axes"]["minutes"]
    assert 0 < minutes[0] < minutes[-1]


def test_decisions_carry_their_reasons_on_the_batch_panel(runs: list[RunData]) -> None:
    traces = payload(render_html(runs[:1]))["figures"]["batch"]["data"]
    marks = next(trace for trace in traces if trace["name"] == "decisions")
    changed = runs[0].decisions.query("old_batch != new_batch")
    assert marks["y"] == changed["new_batch"].tolist()
    assert "32 → 64" in marks["text"][0]
    assert "is above 1.5 x" in " ".join(marks["text"])


def test_recipes_are_compared_field_by_field(runs: list[RunData]) -> None:
    text = render_html(runs)
    table = re.search(r"<h2>Recipe</h2>(.*?)</table>", text, re.S)
    assert table
    assert re.findall(r"<code>(.*?)</code>", table[1]) == ["seed"]
    assert "The recipes are the same." in render_html([runs[0], runs[0]])


def test_text_of_users_is_never_markup(tmp_path: Path) -> None:
    run_dir = tmp_path / EVIL.replace("/", "∕")
    write_run(run_dir, steps=40, name=EVIL)
    run = read_run(run_dir)
    for frame, name in ((run.decisions, "reason"), (run.events, "text"), (run.events, "kind")):
        frame[name] = EVIL
    for frame, name in ((run.decisions, "inputs"), (run.decisions, "candidates")):
        frame[name] = json.dumps({EVIL: EVIL})
    run.result.update(status=EVIL, message=EVIL)  # type: ignore[union-attr]
    for shown in ([run], [run, run]):
        text = render_html(shown)
        assert "<script>alert" not in text
        assert Page(text).tags.count("script") == 3
        for figure in payload(text)["figures"].values():
            for trace in figure["data"]:
                told = [trace["name"], *trace.get("text", [])]
                assert not any("<script" in words for words in told)


def test_a_page_stays_small_for_long_runs_and_many_runs() -> None:
    rng = np.random.default_rng(0)
    size = 60_000
    numbers = {
        name: rng.uniform(0.1, 1.0, size)
        for name in (
            "lr", "gain", "loss", "accuracy", "noise_scale", "gsnr", "efficiency",
            "samples_per_second", "step_seconds", "data_seconds", "global_batch", "world_size",
        )
    }  # fmt: skip
    steps = pd.DataFrame({"step": np.arange(size), "samples_seen": np.arange(size), **numbers})
    steps["time"] = 1e9 + steps["step"]
    steps["skipped"] = False
    run = RunData(path="long", steps=steps)
    for number in (1, 12):
        text = render_html([run] * number)
        assert len(text.encode()) < 6_000_000
        for figure in payload(text)["figures"].values():
            assert all(len(trace["y"]) <= 2000 for trace in figure["data"])


def test_what_a_decision_did_not_know_is_left_out(runs: list[RunData]) -> None:
    candidates = json.dumps([{"global_batch": 64, "score": None, "note": "in force"}])
    decisions = runs[0].decisions.assign(candidates=candidates)
    text = Page(render_html([RunData(path="x", steps=runs[0].steps, decisions=decisions)])).text
    assert "global batch 64, note in force" in text
    assert "None" not in text


def test_runs_whose_names_are_numbers_have_bars_side_by_side(runs: list[RunData]) -> None:
    trials = [RunData(path=f"trials/0000{at}", steps=runs[0].steps) for at in (0, 3)]
    (bars,) = [panel.figure for panel in panels(trials) if panel.name == "time"]
    assert bars["layout"]["yaxis"]["type"] == "category"
    assert bars["data"][0]["y"] == ["00000", "00003"]


def test_left_over_ends_of_epochs_make_no_comb() -> None:
    steps = pd.DataFrame(
        {
            "step": range(1, 7), "samples_seen": [32, 64, 72, 104, 136, 144],
            "epoch": [0, 0, 0, 1, 1, 1], "global_batch": [32, 32, 8] * 2,
            "lr": [0.1, 0.1, 0.025] * 2, "gain": [2.0, 2.0, 1.0] * 2,
        }
    )  # fmt: skip
    drawn = {panel.name: panel.figure["data"] for panel in panels([RunData(path="x", steps=steps)])}
    assert set(drawn["lr"][0]["y"]) == {0.1}
    assert set(drawn["gain"][0]["y"]) == {2.0}


def test_a_run_without_anything_still_has_a_page(tmp_path: Path) -> None:
    Journal(tmp_path)
    text = render_html([read_run(tmp_path)])
    assert payload(text)["figures"] == {}
    assert text.count("Nothing was recorded.") >= 8
    assert "The run is still going on, or was killed" in text


@pytest.mark.parametrize("broken", [None, float("nan"), "word"])
def test_columns_may_hold_nothing(runs: list[RunData], broken: Any) -> None:
    """Each column in turn is unusable or missing; the page must still be whole."""
    for name in runs[0].steps.columns:
        for steps in (
            runs[0].steps.assign(**{name: broken}),
            runs[0].steps.drop(columns=name),
        ):
            run = RunData(path="x", steps=steps, events=runs[0].events, evals=runs[0].evals)
            for panel in panels([run]):
                json.dumps(panel.figure, allow_nan=False)
    empty = pd.DataFrame()
    run = RunData(path="x", steps=runs[0].steps, decisions=empty, evals=empty, events=empty)
    payload(render_html([run, run]))


def test_no_run_is_an_error() -> None:
    with pytest.raises(UserError, match="at least one run directory"):
        render_html([])


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, runs: list[RunData]) -> None:
    with pytest.raises(UserError, match=r"missing/report\.html: the report can't be written"):
        write_html(runs, tmp_path / "missing" / "report.html")


def test_places_of_workers_are_drawn_where_they_changed(tmp_path):
    write_run(tmp_path / "run")
    (members,) = [p for p in panels([read_run(tmp_path / "run")]) if p.name == "members"]
    first, second = members.figure["data"][:2]
    assert None not in first["y"]
    assert set(first["y"]) == {1.0}
    assert second["y"].count(None) == 2  # both ends of the time with one worker
    assert second["y"][0] == second["y"][-1] == 2.0
    write_run(tmp_path / "other", seed=1)
    both = [read_run(tmp_path / name) for name in ("run", "other")]
    assert "members" not in {panel.name for panel in panels(both)}


def test_decisions_are_marked_on_the_loss_at_its_height(tmp_path):
    write_run(tmp_path / "run")
    run = read_run(tmp_path / "run")
    (loss,) = [p for p in panels([run]) if p.name == "loss"]
    (marks,) = [t for t in loss.figure["data"] if t["name"] == "batch changed"]
    changed = run.decisions[run.decisions.old_batch != run.decisions.new_batch]
    assert marks["meta"]["axes"]["steps"] == changed.step.astype(float).tolist()
    curve = next(t for t in loss.figure["data"] if t["name"] == "training")["y"]
    heights = [height for height in curve if height is not None]
    assert min(heights) <= min(marks["y"]) <= max(marks["y"]) <= max(heights)
    assert all("→" in text for text in marks["text"])


def test_the_caption_of_gsnr_says_what_is_recorded(runs: list[RunData]) -> None:
    """As the live metric of that name does: the column is `LayerAverages.median_gsnr`."""
    run = runs[0]
    steps = run.steps.assign(gsnr=0.5)
    run = RunData(path="x", steps=steps, events=run.events, evals=run.evals)
    (shown,) = [panel for panel in panels([run]) if panel.name == "gsnr"]
    assert "median over layers" in shown.note
    assert "single example" in shown.note


def test_no_line_ends_within_a_number_with_its_units():
    assert prose("5 min 29 s, 4.2 % <of> 8 steps") == (
        "5&nbsp;min&nbsp;29&nbsp;s, 4.2&nbsp;% &lt;of&gt; 8 steps"
    )
