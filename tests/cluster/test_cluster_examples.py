"""The three doors, as their examples use them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "experiments" / "examples"

pytestmark = pytest.mark.cluster


def run(example: str, *words: str, cwd: Path) -> str:
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / example), *words],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


def test_every_example_is_tested():
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    for path in EXAMPLES.glob("*.py"):
        assert path.name in tests, f"no test runs {path.name}"


def test_from_a_recipe(tmp_path):
    output = run("from_a_recipe.py", "out=run", "stop.steps=6", cwd=tmp_path)
    assert "done: " in output
    assert len(pd.read_parquet(tmp_path / "run" / "steps")) >= 6


def test_own_model_and_data(tmp_path):
    output = run("own_model_and_data.py", "out=run", cwd=tmp_path)
    accuracy = float(output.rsplit("held-out accuracy ", 1)[1].split()[0])
    assert accuracy > 0.9
    batches = pd.read_parquet(tmp_path / "run" / "decisions")
    assert (batches.new_batch > batches.old_batch).any()


def test_own_loop(tmp_path):
    output = run(
        "own_loop.py",
        str(tmp_path / "ray"),
        f"out={tmp_path / 'run'}",
        "stop.steps=6",
        cwd=tmp_path,
    )
    assert "rank 0: " in output
    assert "rank 1: " in output
    steps = pd.read_parquet(tmp_path / "run" / "steps")
    assert set(steps.world_size) == {2}


def test_a_cluster_that_has_just_begun_is_asked_again(monkeypatch):
    spec = importlib.util.spec_from_file_location("submit_job", EXAMPLES / "submit_job.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(script.time, "sleep", lambda seconds: None)
    answers = [RuntimeError("No available agent to submit job"), "job-1", RuntimeError("no disk")]

    class Client:
        @staticmethod
        def submit_job(**words):
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

    assert script.submit(Client(), "true", {}, None) == "job-1"
    with pytest.raises(RuntimeError, match="no disk"):
        script.submit(Client(), "true", {}, None)
