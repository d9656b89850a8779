"""The guides' commands that train, for real: each as it stands there, only shorter and smaller."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pandas as pd
import pytest

from adaptive_platform import cli
from adaptive_platform.cli.words import split_words
from adaptive_platform.cluster.launch import launch
from adaptive_platform.cluster.trainer import resolve_recipe
from adaptive_platform.recipe import load_recipe
from adaptive_platform.sweeps.config import load_sweep
from adaptive_platform.sweeps.launch import run_sweep

DOCS = Path(__file__).parents[2] / "docs"
SMALL = ["model.name=resnet8_cifar", "stop.steps=4", "report.html=false"]
TRAINED = {
    "quickstart": "train quickstart model.name=resnet8_cifar out=runs/small",
    "optimizers": "train quickstart model.name=resnet8_cifar batch.kind=fixed optimizer.kind=kfac "
    "optimizer.lr=0.1 out=runs/kfac",
    "elasticity": "train quickstart workers=[1,4] report.flush_seconds=10",
    "dashboards": "train quickstart report.trackers=[tensorboard] out=runs/tracked",
}
"""A command that trains from a guide; jobs and loops of one's own have tests beside this one."""
SWEPT = "sweep warmup-lars budget.trials=8 budget.seconds=600 stop.epochs=4 out=sweeps/b"

pytestmark = pytest.mark.cluster


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check_is_in(guide: str, command: str) -> None:
    assert f"adaptive-platform {command}\n" in (DOCS / f"{guide}.md").read_text(), command


def words_of(guide: str, command: str) -> tuple[str | None, list[str]]:
    check_is_in(guide, command)
    return split_words(shlex.split(command)[1:])


@pytest.mark.parametrize("guide", TRAINED)
def test_a_run_of_the_guide_ends_well(guide, shared_ray, workplace, monkeypatch, capsys):
    recipe, words = words_of(guide, TRAINED[guide])
    alone = [] if "workers=" in TRAINED[guide] else ["workers=1"]
    result = launch(resolve_recipe(recipe, [*words, *SMALL, *alone]))
    assert (result.status, result.message) == ("done", "")
    assert result.steps == 4
    (run,) = (workplace / "runs").iterdir()
    assert len(pd.read_parquet(run / "steps")) == 4
    assert bool(list(run.rglob("events.out.tfevents*"))) == (guide == "dashboards")
    if guide != "quickstart":
        return
    for command in ("report runs/small", "replay runs/small --controller goodput"):
        check_is_in(guide, command)
        monkeypatch.setattr(sys, "argv", ["adaptive-platform", *command.split()])
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert not end.value.code, capsys.readouterr().err
    assert (run / "report.html").stat().st_size > 1e6


def test_the_sweep_of_its_guide(shared_ray, workplace):
    name, words = words_of("sweeps", SWEPT)
    # In epochs, as what the file draws for the warm-up is in epochs.
    short = ["budget.trials=2", "stop.epochs=0.5", "report.evaluate_every=0.25 epochs"]
    short += [word for word in SMALL if not word.startswith("stop")]
    result = run_sweep(load_sweep(name or "", [*words, *short]))
    assert result.exit_code == 0
    assert {row.status for row in result.rows} <= {"done", "stopped early"}
    assert len(pd.read_parquet("sweeps/b/results.parquet")) == 2
    assert (workplace / "sweeps" / "b" / "sweep.html").stat().st_size > 1e6
    assert load_recipe("sweeps/b/best.yaml").name == "warmup-lars-best"
