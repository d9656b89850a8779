"""Guides: every command runs; what trains, up to the point where Ray would start."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from report_examples import step_record

from adaptive_platform import cli
from adaptive_platform.bench import chaos, recovery
from adaptive_platform.bench.scenarios import scenarios
from adaptive_platform.cluster import launch as training
from adaptive_platform.recipe import load_recipe
from adaptive_platform.report import Journal, RunResult
from adaptive_platform.sweeps import launch as sweeping
from adaptive_platform.sweeps.config import load_sweep
from adaptive_platform.sweeps.fitting import checked_recipes

ROOT = Path(__file__).parents[1]
GUIDES = sorted((ROOT / "docs").glob("*.md"))
ELSEWHERE = {
    "prometheus": "tests/cluster/test_cluster_metrics.py",
    "promtool": "tests/report/test_report_metrics.py",
    "grafana-server": "",
    "cp": "",
    "export": "tests/cluster/test_cluster_jobs.py",
    "ray": "tests/cluster/test_cluster_jobs.py",
}
"""Commands of other programs, and the test that runs them, where there is one."""


@dataclass(frozen=True)
class Command:
    guide: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.guide}: {' '.join(self.words)}"


def commands() -> list[Command]:
    found = []
    for guide in GUIDES:
        for block in re.findall(r"```bash\n(.*?)```", guide.read_text(), re.S):
            for line in block.splitlines():
                words = shlex.split(line, comments=True)
                if words:
                    found.append(Command(guide.stem, tuple(words)))
    return found


OURS = [each for each in commands() if each.words[0] == "adaptive-platform"]


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A folder with the runs and sweeps that the guides speak of, and nothing that starts Ray."""
    recipe = load_recipe("quickstart", ["model.name=resnet8_cifar"]).to_yaml()
    for name in ("small", "fixed", "noise", "../sweeps/b/trials/00000", "../sweeps/b/trials/00001"):
        folder = tmp_path / "runs" / name
        journal = Journal(folder)
        for number in range(1, 60):
            noise = {"noise_scale": 40.0, "noise_trace": 4.0, "signal_sqnorm": 0.1}
            journal.step(step_record(number, **noise))
        journal.flush()
        (folder / "recipe.yaml").write_text(recipe)
    (tmp_path / "sweeps/b/best.yaml").write_text(load_recipe("quickstart").to_yaml())
    (tmp_path / "sweeps/a").mkdir()
    (tmp_path / "sweeps/a/sweep.yaml").write_text(load_sweep("controllers").to_yaml())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    for service in ("PROMETHEUS", "GRAFANA"):
        monkeypatch.setenv(f"RAY_{service}_HOST", "http://127.0.0.1:9")
    return tmp_path


@pytest.mark.parametrize("command", OURS, ids=str)
def test_a_command_of_ours_runs(command, workplace, monkeypatch, capsys):
    started = []

    def launch(recipe, **_):
        training._check_early(recipe, {})
        started.append(recipe)
        return RunResult(status="done", exit_code=0)

    def run_sweep(sweep, *, resume=None, console=None):
        planned = sweep.searcher.planned(sweep.space, sweep.budget.trials, sweep.seed)
        checked_recipes(sweep, planned)
        started.append(sweep)
        return sweeping.SweepResult(exit_code=0, path=resume or "", rows=(), best=None)

    def play(*, cases=(), soak_minutes=0.0, **_):
        unknown = set(cases) - {scene.name for scene in scenarios()}
        assert not unknown
        started.append(cases or soak_minutes)
        return []

    def recover(**_):
        started.append("recovery")
        return []

    monkeypatch.setattr(chaos, "chaos", play)
    monkeypatch.setattr(recovery, "recovery", recover)
    monkeypatch.setattr(training, "launch", launch)
    monkeypatch.setattr(sweeping, "run_sweep", run_sweep)
    words = [w for w in command.words if w not in ("--address", "auto")]
    if words[1:2] == ["doctor"] and "/shared/runs" in words:
        words[words.index("/shared/runs")] = str(workplace / "shared")
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code in (0, None), capsys.readouterr().err
    begins = words[1] == "train" or (words[1] == "sweep" and len(words) > 2)
    begins = begins or words[1:3] in (["bench", "chaos"], ["bench", "recovery"])
    assert bool(started) == begins


def test_the_guides_show_what_they_should():
    assert {guide.stem for guide in GUIDES} >= {
        "quickstart", "own-loop", "cluster", "controllers", "optimizers", "sweeps", "dashboards",
        "troubleshooting",
    }  # fmt: skip
    assert len(OURS) > 20


def test_other_programs_are_known_and_scripts_are_there():
    for command in commands():
        first = command.words[0]
        if first == "python":
            assert (ROOT / command.words[1]).is_file(), command
        elif first != "adaptive-platform":
            assert first in ELSEWHERE, command
            assert not ELSEWHERE[first] or (ROOT / ELSEWHERE[first]).is_file()


def test_files_in_the_guides_can_be_read(tmp_path):
    for guide in GUIDES:
        for block in re.findall(r"```yaml\n(.*?)```", guide.read_text(), re.S):
            content = yaml.safe_load(block)
            if "space" in content:
                sweep = load_sweep(content)
                planned = sweep.searcher.planned(sweep.space, sweep.budget.trials, 0)
                assert all(map(sweep.recipe_of, planned or []))


def test_the_folder_that_grafana_is_given_exists():
    copied = [c for c in commands() if c.words[0] == "cp"]
    assert copied
    for command in copied:
        assert list(ROOT.glob(command.words[1]))
