"""Sweeps on a real Ray: what can't fit is refused, the rest takes turns, failures don't stop it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

from adaptive_platform.recipe import load_recipe

ROOT = Path(__file__).parents[2]


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


@pytest.mark.cluster
def test_trials_that_fit_alone_take_turns_and_failures_are_told(tmp_path):
    """F30: three workers are refused at once; trials of two workers run one after the other."""
    ended = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("sweep_cluster.py")), str(tmp_path)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    assert "workers = 3: a trial needs 3 CPU" in found["refused"]
    assert "the cluster has 2 CPU" in found["refused"]
    assert found["exit_code"] == 0
    status = [row["status"] for row in found["rows"]]
    assert status == ["done", "failed"], ended.stderr
    assert "finite" in found["rows"][1]["message"]
    out = tmp_path / "sweep"
    first, second = (pd.read_parquet(out / "trials" / f"0000{n}" / "steps") for n in (0, 1))
    assert (first.world_size == 2).all()
    assert first.time.max() < second.time.min(), "the trials ran at the same time"
    table = pd.read_parquet(out / "results.parquet")
    assert table.trial.tolist()[0] == found["best"]
    assert sorted(table["optimizer.lr"]) == [0.02, 1e30]
    best = load_recipe(str(out / "best.yaml"))
    assert best.optimizer.lr == table["optimizer.lr"].tolist()[0]
    assert best.out is None
    page = (out / "sweep.html").read_text()
    assert "Winning recipe" in page
    assert "trial 00001 failed" in ended.stderr


@pytest.mark.cluster
def test_ctrl_c_keeps_what_is_done_and_the_sweep_goes_on(tmp_path):
    command = [sys.executable, "-m", "adaptive_platform", "sweep"]
    (tmp_path / "one.yaml").write_text(
        "name: one\n"
        "set: {model.name: resnet8_cifar, stop.epochs: 4, batch.kind: fixed, lr_rule.kind: none,\n"
        "      batch.global_batch: 64, checkpoint.every: 5 steps, report.evaluate_every: 5 steps}\n"
        "space: {seed: {kind: choice, values: [1]}}\n"
        "searcher: {kind: grid}\n"
        "budget: {concurrent: 1}\n"
    )
    words = ["one.yaml", "out=sweep"]
    process = subprocess.Popen(
        [*command, *words], cwd=tmp_path, env=environment(), stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("sweep/trials/*/checkpoints/*/manifest.json")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 130, output
    assert "adaptive-platform sweep resume=" in output
    (saved,) = tmp_path.glob("sweep/trials/*")
    assert (tmp_path / "sweep" / "results.parquet").exists()
    again = subprocess.run(
        [*command, "resume=sweep"], cwd=tmp_path, env=environment(), capture_output=True,
        text=True, check=False, timeout=200,
    )  # fmt: skip
    assert again.returncode == 0, again.stdout + again.stderr
    table = pd.read_parquet(tmp_path / "sweep" / "results.parquet")
    assert table.status.tolist() == ["done"]
    steps = pd.read_parquet(saved / "steps")
    assert steps.step.tolist() == list(range(1, len(steps) + 1))
    events = pd.read_parquet(saved / "events")
    assert "resume" in set(events.kind), "the trial began anew instead of going on"
