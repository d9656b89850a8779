"""The command: what ships is listed, and what can't work is refused before Ray starts."""

from __future__ import annotations

import sys

import pytest
import yaml

from adaptive_platform.cli import main
from adaptive_platform.errors import UserError
from adaptive_platform.sweeps import launch, searchers
from adaptive_platform.sweeps.config import load_sweep, shipped_sweeps


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def run(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["adaptive-platform", "sweep", *words])
        with pytest.raises(SystemExit) as end:
            main()
        said = capsys.readouterr()
        return int(end.value.code or 0), said.out + said.err

    return run


def test_without_words_it_lists_what_ships(command):
    code, said = command()
    assert code == 0
    assert [line.split()[0] for line in said.splitlines()] == sorted(shipped_sweeps())


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["controler"], ["sweep = controler", "Did you mean `controllers`"]),
        (["controllers", "budget.trails=3"], ["budget.trails", "Did you mean `budget.trials`"]),
        (["controllers", "optimizer.lrate=1"], ["optimizer.lrate: there is no such field"]),
        (["controllers", "budget.trials=3"], ["the grid has 8 combinations"]),
        (
            ["warmup-lars", "searcher.kind=grid"],
            ["space.optimizer.lr.kind = log_uniform", "choice"],
        ),
        (["controllers", "address=127.0.0.1:9"], ["nobody answers"]),
        (["resume=/nowhere"], ["resume = /nowhere", "no directory of a sweep"]),
        (["controllers", "resume=x"], ["leave the other words away"]),
        (["controllers", "stop"], ["stop: write overrides as field=value"]),
    ],
)
def test_wrong_words_are_explained(words, parts, command, tmp_path):
    code, said = command(*words)
    assert code == 2, said
    assert all(part in said for part in parts), said
    assert "Traceback" not in said
    assert list(tmp_path.iterdir()) == []


def test_a_directory_with_a_sweep_is_not_used_again(command, tmp_path):
    (tmp_path / "sweep.yaml").write_text(load_sweep("controllers").to_yaml())
    code, said = command("controllers", f"out={tmp_path}")
    assert code == 2
    assert f"resume={tmp_path}" in said


@pytest.mark.parametrize(("words", "address"), [([], "auto"), (["--address", "local"], "local")])
def test_a_resumed_sweep_goes_back_to_its_cluster(command, tmp_path, monkeypatch, words, address):
    stored = load_sweep("controllers", ["address=auto"])
    (tmp_path / "sweep.yaml").write_text(stored.to_yaml())
    begun = []

    def begin(sweep, **_):
        begun.append(sweep.address)
        raise UserError("that is enough")

    monkeypatch.setattr(launch, "run_sweep", begin)
    code, said = command(f"resume={tmp_path}", *words)
    assert (code, begun) == (2, [address]), said


def test_optuna_that_is_missing_is_named(command, monkeypatch):
    monkeypatch.setattr(searchers.importlib.util, "find_spec", lambda name: None)
    code, said = command("warmup-lars", "searcher.kind=optuna")
    assert code == 2
    assert "adaptive-platform[optuna]" in said


def test_a_population_can_not_move_where_a_controller_begins(command, tmp_path):
    content = {
        "space": {
            "batch.global_batch": {"kind": "choice", "values": [32, 64]},
        },
        "scheduler": {"kind": "pbt", "moves": ["batch.global_batch"]},
    }
    (tmp_path / "moving.yaml").write_text(yaml.safe_dump(content))
    code, said = command("moving.yaml")
    assert code == 2
    assert "use batch.kind=fixed" in said
