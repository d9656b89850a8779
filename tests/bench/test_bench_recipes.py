"""The benchmark of recipes: its jobs, its resuming, one tiny run on threads, and its pages."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from ranks import as_threads
from torch.distributed import HashStore
from typer.testing import CliRunner

from adaptive_platform.bench import recipes as bench
from adaptive_platform.bench.recipe_cards import write_cards
from adaptive_platform.bench.recipe_pages import CLAIMS, Claim, render, verdict, write_pages
from adaptive_platform.cli import app
from adaptive_platform.collectives import Membership
from adaptive_platform.errors import UserError
from adaptive_platform.models import ModelConfig
from adaptive_platform.recipe import load_recipe

TINY = (
    "data={kind: synthetic, samples: 64, eval_samples: 16, image_size: 8, num_classes: 4}",
    "stop={epochs: 1}",
)


def test_every_arm_trains_on_the_same_number_of_samples_with_the_same_workers():
    jobs = bench.jobs_for(bench.arms(), 2)
    assert len({job.key for job in jobs}) == len(jobs) == 2 * len(bench.arms())
    assert {(job.recipe["stop"]["epochs"], job.recipe["workers"]) for job in jobs} == {(10, 2)}
    assert {load_recipe(job.recipe).lr_rule.clock for job in jobs} == {"samples"}
    assert [job.seed for job in jobs] == sorted(job.seed for job in jobs)


def test_all_claims_are_about_arms_that_run():
    known = bench.arms()
    for claim in CLAIMS:
        assert {claim.larger, claim.smaller} <= set(known)
    assert bench.REFERENCE in known


def test_a_result_belongs_to_the_settings_it_was_made_with():
    (one,), (other,) = (bench.jobs_for(["das-2016"], 1, changes=c) for c in ((), TINY[1:]))
    (renamed,) = bench.jobs_for(["das-2016"], 1, changes=["description=x", TINY[0]])
    assert one.settings != other.settings
    assert one.settings == renamed.settings


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Two arms, trained by two threads."""
    jobs = bench.jobs_for(["das-2016", "jin-2016-gossip"], 1, changes=TINY)
    record, store = tmp_path_factory.mktemp("bench") / "recipes-x.jsonl", HashStore()
    as_threads(2, lambda rank: bench.train_all(Membership(store, rank, 2), jobs, str(record)))
    return jobs, record


def test_a_run_becomes_a_line(recorded):
    jobs, record = recorded
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    assert [(line["arm"], line["seed"], line["settings"]) for line in lines] == [
        job.key for job in jobs
    ]
    summed, gossip = lines
    assert (summed["steps"], gossip["steps"]) == (2, 1)
    assert summed["samples"] == gossip["samples"] == 64
    assert summed["curve"][-1][:2] == [2, 64]
    assert 0 <= summed["exposed_share"] <= 1
    weights = 4 * sum(p.numel() for p in ModelConfig(name="resnet8_cifar").build(4, 0).parameters())
    # A ring of two sends each gradient once; with gossip only what was drawn and a few numbers go.
    assert weights < summed["bytes_per_step"] < 1.05 * weights


def test_what_was_run_is_not_run_again(recorded, tmp_path, monkeypatch):
    jobs, record = recorded
    copy = tmp_path / "recipes-digits.jsonl"
    # The end of a line that was being written when the study was killed is cut off.
    copy.write_text(record.read_text() + '{"arm": "small ba')
    asked = []
    monkeypatch.setattr(bench, "jobs_for", lambda *_, **__: jobs)
    monkeypatch.setattr(bench, "run_group", lambda *call, **_: asked.append(call))
    rows = bench.recipes(quick=True, out=str(tmp_path))
    assert not asked
    assert copy.read_text() == record.read_text()
    assert {row.case for row in rows} >= {"das-2016: accuracy", "jin-2016-gossip: bytes per step"}
    assert all(row.baseline is None and row.repeats == 1 for row in rows)
    for suffix in ("md", "html"):
        assert (tmp_path / f"recipes-digits.{suffix}").stat().st_size > 500


def test_missing_runs_are_made_by_the_recipes_number_of_workers(recorded, tmp_path, monkeypatch):
    jobs, record = recorded
    copy = tmp_path / "recipes-digits.jsonl"
    copy.write_text(record.read_text().splitlines(keepends=True)[0])

    def run(workers, body, missing, path, **_):
        assert (workers, body, missing) == (2, bench.train_all, jobs[1:])
        with open(path, "a") as file:
            file.write(record.read_text().splitlines(keepends=True)[1])

    monkeypatch.setattr(bench, "jobs_for", lambda *_, **__: jobs)
    monkeypatch.setattr(bench, "run_group", run)
    assert len(bench.recipes(quick=True, out=str(tmp_path))) == 12


def lines_of(arm, accuracies, steps=10, seeds=None):
    return [
        {"arm": arm, "seed": seed, "accuracy": accuracy, "steps": steps, "samples": 640,
         "seconds": 2.0, "bytes_per_step": 1024.0, "exposed_share": 0.25,
         "curve": [[5, 320, accuracy / 2], [steps, 640, accuracy]]}
        for seed, accuracy in zip(seeds or range(len(accuracies)), accuracies, strict=True)
    ]  # fmt: skip


CLAIM = Claim(text="a beats b", larger="a", smaller="b")


@pytest.mark.parametrize(
    ("a", "b", "told"),
    [
        ([0.97, 0.98, 0.99], [0.90, 0.91, 0.92], "**shows**, +7.0 ± 0.0 points."),
        ([0.90, 0.91, 0.92], [0.97, 0.98, 0.99], "**the opposite shows**, -7.0 ± 0.0 points."),
        ([0.90, 0.95, 0.92], [0.90, 0.91, 0.92], "**does not show**, +1.3 ± 5.7 points."),
        ([0.95], [0.90], "one seed says +5.0 points."),
    ],
)
def test_verdicts_are_paired_differences_with_their_interval(a, b, told):
    assert verdict(CLAIM, {"a": lines_of("a", a), "b": lines_of("b", b)}) == told


def test_a_claim_without_figures_is_not_decided():
    steps = Claim(text="x", larger="a", smaller="b", figure="steps_to_target")
    arms = {"a": lines_of("a", [0.96, 0.97]), "b": lines_of("b", [0.96, 0.5])}
    assert verdict(steps, arms) == "can't be said, 1 of 2 seeds have the figure on both sides."
    assert verdict(CLAIM, {"a": arms["a"]}) is None


def test_the_page_shows_means_intervals_and_what_is_missing(tmp_path):
    lines = lines_of("small batch", [0.96, 0.97, 0.98]) + lines_of("goyal-2017", [0.5, 0.97, 0.6])
    page = render(lines, "recipes-digits")
    assert "| small batch | 97.0 ± 2.5 | 10 | 10 | 640 | 2.0 | 1.0 | 25.0 | 3 |" in page
    assert "| - (1 of 3) |" in page
    assert "A large batch with the linear rule loses accuracy: **" in page
    stem = tmp_path / "recipes-digits"
    write_pages(lines, stem, reference="small batch", panels=["goyal-2017"])
    assert stem.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "goyal-2017" in (tmp_path / "recipes-digits.html").read_text()


def test_a_folder_without_images_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"--images = .*: there is no train\.parquet"):
        bench.jobs_for(["das-2016"], 1, images=str(tmp_path))
    for name in ("train", "test"):
        (tmp_path / f"{name}.parquet").touch()
    (job,) = bench.jobs_for(["das-2016"], 1, images=str(tmp_path))
    assert job.recipe["data"]["kind"] == "parquet"
    assert job.recipe["data"]["limit"] == 10_000


def test_the_list_is_in_three_parts():
    shown = CliRunner().invoke(app, ["recipes"]).output
    first, small, large = shown.split("\n\n")
    assert first.startswith("quickstart ")
    assert "\ngoyal-2017 " in small
    assert "imagenet" not in small
    assert "\ngoyal-2017-imagenet " in large
    assert all(len(line) < 160 for line in shown.splitlines())


CARDS = Path(__file__).parents[2] / "experiments" / "recipes"
RECORDED = CARDS.parent / "studies" / "recipes-digits.jsonl"


def test_a_card_shows_its_arms_beside_the_reference_and_nothing_else_of_it_changes(tmp_path):
    card = tmp_path / "lin-2018.md"
    card.write_text("before\n<!-- measured -->\nold\n<!-- /measured -->\nafter\n")
    lines = lines_of("small batch", [0.97]) + lines_of("lin-2018", [0.9, 0.8], steps=7)
    arms = {"lin-2018": ["lin-2018", "lin-2018, every step"]}
    write_cards(lines, tmp_path, arms_of=arms, reference="small batch")
    before, *table, after = card.read_text().splitlines()
    assert (before, after) == ("before", "after")
    assert [row.split(" | ")[0] for row in table[3:-1]] == ["| small batch", "| lin-2018"]
    assert "old" not in card.read_text()


def test_a_card_without_a_place_is_named_and_no_card_is_written(tmp_path):
    good, bad = tmp_path / "a.md", tmp_path / "b.md"
    good.write_text("<!-- measured --><!-- /measured -->")
    bad.write_text("nothing")
    with pytest.raises(UserError, match=r"b\.md needs one part"):
        write_cards([], tmp_path, arms_of={"a": [], "b": []}, reference="small batch")
    assert good.read_text() == "<!-- measured --><!-- /measured -->"


def test_the_cards_show_what_the_committed_study_measured(tmp_path):
    lines = [json.loads(line) for line in RECORDED.read_text().splitlines()]
    for name in bench.arms_of_cards():
        shutil.copy(CARDS / f"{name}.md", tmp_path)
    write_cards(lines, tmp_path, arms_of=bench.arms_of_cards(), reference=bench.REFERENCE)
    for name in bench.arms_of_cards():
        shown = (tmp_path / f"{name}.md").read_text()
        assert shown == (CARDS / f"{name}.md").read_text(), name
        assert f"\n| {name} | " in shown, "the card has no figures"
