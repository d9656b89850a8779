"""The language of trouble, its invariants, and that one scenario can't stop the others."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from torch.distributed import HashStore
from typer.testing import CliRunner

from adaptive_platform.bench import chaos as chaos_bench
from adaptive_platform.bench import invariants
from adaptive_platform.bench.chaos import chaos, rows_of, table
from adaptive_platform.bench.faults import Network, Orders, PacedLoss, Points, checksum
from adaptive_platform.bench.hosts import clear_hosts
from adaptive_platform.bench.invariants import hold_against_calm, longest_gap, recipe, until_full
from adaptive_platform.bench.judging import Finding
from adaptive_platform.bench.scenarios import random_trouble, scenario_of, scenarios
from adaptive_platform.bench.stage import adopt_orphans, descendants, end_descendants
from adaptive_platform.checkpoints.store import CheckpointStore
from adaptive_platform.cli import app
from adaptive_platform.cluster.recorder import Recorder
from adaptive_platform.collectives import Membership
from adaptive_platform.data import PythonConfig, wrap_dataset
from adaptive_platform.errors import UserError
from adaptive_platform.report.journal import Journal
from adaptive_platform.training.run import TrainingRun

STEPS = 50


@pytest.fixture(scope="module")
def calm_run(tmp_path_factory) -> tuple[Path, dict[str, list[str]]]:
    """The directory and notes of a run of one worker that took its steps in peace."""
    folder = tmp_path_factory.mktemp("calm")
    (folder / "orders").mkdir()
    orders = Orders(str(folder / "orders"))
    config = recipe(None, (1, 1), f"stop.steps={STEPS}")
    torch.manual_seed(config.seed)
    model = Network(str(folder / "orders"))
    recorder = Recorder(None, 30.0)
    recorder.open(Journal(folder / "run"))
    loss = PacedLoss(seconds_per_sample=0.0)
    with TrainingRun(
        config,
        model,
        wrap_dataset(Points()),
        PythonConfig(),
        Membership(HashStore(), 0, 1),
        observer=recorder,
        store=CheckpointStore(str(folder / "run")),
    ) as run:
        for batch in run:
            outputs = model(batch.inputs)
            run.backward(loss(outputs, batch.targets), outputs)
    recorder.close()
    return folder / "run", orders.notes()


def judged(run: Path, notes: dict[str, list[str]], **words: int):
    return hold_against_calm(run, notes, **({"repeated": 0, "unreadable": 0} | words))


def test_a_calm_run_holds_all_invariants(calm_run):
    found = judged(*calm_run)
    assert found.wrong == ()
    assert (found.steps, found.samples_lost, found.samples_repeated) == (STEPS, 0, 0)
    assert found.weights_alike


def changed(run: Path, folder: Path, change) -> Path:
    """A copy of a run directory with other rows of steps."""
    copy = folder / "run"
    shutil.copytree(run, copy)
    rows = change(pd.read_parquet(run / "steps").sort_values("step").reset_index(drop=True))
    for part in (copy / "steps").glob("*.parquet"):
        part.unlink()
    rows.to_parquet(copy / "steps" / "part.parquet")
    return copy


def test_rounding_does_not_grow_into_a_difference():
    steps = 1000
    _, weights = invariants._Calm(steps).run(set(), {})
    split = invariants._Calm(steps)
    split._recipe = recipe(None, (1, 1), f"stop.steps={steps}", "microbatch=8")
    _, others = split.run(set(), {})
    assert max(float((weights[name] - others[name]).abs().max()) for name in weights) < 1e-5


def test_a_lost_step_a_lost_sample_and_one_that_came_twice_are_seen(calm_run, tmp_path):
    run, notes = calm_run

    def without_one(rows: pd.DataFrame) -> pd.DataFrame:
        return rows.drop(index=7)

    found = judged(changed(run, tmp_path / "a", without_one), notes)
    assert "the records of steps have gaps or repeats" in found.wrong

    def other_sample(rows: pd.DataFrame) -> pd.DataFrame:
        ids = [[list(share) for share in row] for row in rows.sample_ids]
        ids[3][0][0] = ids[3][0][1]
        return rows.assign(sample_ids=ids)

    found = judged(changed(run, tmp_path / "b", other_sample), notes)
    assert (found.samples_lost, found.samples_repeated) == (1, 1)
    assert "1 samples were lost, 1 came twice" in found.wrong


def test_a_worker_with_other_weights_is_seen(calm_run):
    run, notes = calm_run
    found = judged(run, notes | {"notes-7": ["0badcafe"]})
    assert not found.weights_alike
    assert any("different weights" in line for line in found.wrong)
    # After a restart the steps that are made again may differ in their last bits.
    assert judged(run, notes | {"notes-7": ["0badcafe"]}, repeated=1).weights_alike


def test_times_of_gaps_and_of_full_numbers(tmp_path):
    (tmp_path / "steps").mkdir()
    times = [100.0, 100.1, 101.6, 101.7, 108.0]
    rows = pd.DataFrame({"time": times, "world_size": [3, 3, 2, 2, 3]})
    rows.to_parquet(tmp_path / "steps" / "part.parquet")
    assert longest_gap(tmp_path, [100.15])[0] == pytest.approx(6.3)
    assert until_full(tmp_path, 100.15, 3) == pytest.approx(7.85)
    assert until_full(tmp_path, 100.15, 4) != until_full(tmp_path, 100.15, 4), "NaN: it stayed low"


def test_orders_reach_one_process_once(tmp_path):
    orders = Orders(str(tmp_path))
    orders.give("nan-loss", os.getpid())
    orders.give("nan-gradient", os.getpid() + 1)
    loss = PacedLoss(str(tmp_path), seconds_per_sample=0.0)
    model = Network(str(tmp_path))
    inputs, targets = Points()[0]
    losses = [loss(model(inputs[None]), targets[None]) for _ in range(2)]
    assert torch.isnan(losses[0]).all()
    assert torch.isfinite(losses[1]).all()
    losses[1].sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    (said,) = orders.notes().values()
    assert said == [f"{checksum(model):08x}"] * 2
    orders.give("data", os.getpid())
    points = Points(str(tmp_path))
    with pytest.raises(OSError, match="unreadable"):
        points[5]
    assert torch.equal(points[5][0], Points()[5][0])


@pytest.mark.parametrize("place", ["forward", "reduction"])
def test_a_process_ends_where_it_is_ordered_to(tmp_path, place):
    script = """
import os, sys
import torch
from torch.distributed import HashStore
from adaptive_platform.bench.faults import Network, Orders, Points
from adaptive_platform.collectives import Membership, Reducer, RingConfig
Orders(sys.argv[1]).give(sys.argv[2], os.getpid())
print("begins", flush=True)
reducer = Reducer(RingConfig(), Membership(HashStore(), 0, 1), torch.device("cpu"))
Network(sys.argv[1])(Points()[0][0][None])
print("after forward", flush=True)
reducer.start(torch.ones(3)).wait()
print("after reduction", flush=True)
"""
    words = [sys.executable, "-c", script, str(tmp_path), place]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == -9, done.stderr
    assert done.stdout.split("\n")[-2] == {"forward": "begins", "reduction": "after forward"}[place]


def test_orphans_stay_in_sight_and_are_ended():
    script = "import subprocess, sys; subprocess.Popen(['sleep', '60']); print('ready', flush=True)"
    outer = f"""
from adaptive_platform.bench.stage import adopt_orphans, descendants, end_descendants
import subprocess, sys
adopt_orphans()
subprocess.run([sys.executable, "-c", {script!r}], check=True)
print("sleep 60" in descendants().values())
end_descendants()
print(descendants())
"""
    adopt_orphans()
    done = subprocess.run([sys.executable, "-c", outer], capture_output=True, text=True, check=True)
    if sys.platform == "linux":
        assert done.stdout.split("\n")[-3:-1] == ["True", "{}"], done.stdout
    assert os.getpid() not in descendants()
    end_descendants()


def test_what_plays_ends_with_whoever_waits_for_it(tmp_path):
    inner = """
from adaptive_platform.bench.stage import leave_with_parent
import subprocess, time
leave_with_parent()
below = subprocess.Popen(["sleep", "60"])
print(below.pid, flush=True)
time.sleep(60)
"""
    outer = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    adopt_orphans()
    waits = subprocess.Popen(
        [sys.executable, "-c", outer, inner], stdout=subprocess.PIPE, text=True
    )
    assert waits.stdout is not None
    below = int(waits.stdout.readline())
    waits.kill()
    waits.wait()
    deadline = time.monotonic() + 60.0
    while below in descendants() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert below not in descendants()


def test_the_table_has_each_scenario_once_and_says_what_is_allowed():
    names = [scenario.name for scenario in scenarios()]
    assert len(set(names)) == len(names)
    assert all(scenario.limit_seconds <= 300 for scenario in scenarios())
    assert scenario_of("kill").expected.startswith("gap up to 1.5 s, all workers back within 10 s")
    assert scenario_of("soak:15:3").soak_seconds == 900
    draws = [[random_trouble(random.Random(seed)) for _ in range(9)] for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]


def finding(name: str, verdict: str = "as expected") -> Finding:
    scenario = scenario_of(name)
    return Finding(
        name=name,
        event=scenario.event,
        expected=scenario.expected,
        verdict=verdict,
        gap_seconds=0.4,
        full_seconds=6.0,
        steps=120,
        weights_alike=True,
    )


def test_a_failed_scenario_is_a_row_and_the_others_are_played(tmp_path, monkeypatch):
    played = []

    def play(self: object, name: str) -> Finding:
        played.append(name)
        return finding(name, "failed: it hangs" if name == "drain" else "as expected")

    monkeypatch.setattr(chaos_bench._Player, "play", play)
    found = chaos(out=str(tmp_path))
    assert [f.name for f in found] == played == [s.name for s in scenarios()]
    page = (tmp_path / "elasticity.md").read_text()
    assert "| a node drains |" in page
    assert "failed: it hangs" in page
    assert len((tmp_path / "elasticity.jsonl").read_text().splitlines()) == len(played)
    played.clear()
    chaos(out=str(tmp_path))
    assert played == ["drain"], "what is there as expected is not played again"
    played.clear()
    chaos(cases=["kill"], out=str(tmp_path))
    assert played == ["kill"], "unless it is named"
    with pytest.raises(UserError, match="--case = kil: must be one of kill, kill-first"):
        chaos(cases=["kil"])


def test_a_scenario_that_hangs_is_ended_and_so_is_what_it_started(monkeypatch, tmp_path):
    hangs = tmp_path / "hangs.py"
    hangs.write_text("import subprocess, time; subprocess.Popen(['sleep', '99']); time.sleep(99)")
    start = subprocess.Popen

    def popen(words: list[str], **named: object) -> subprocess.Popen:
        if "adaptive_platform.bench.playing" in words:
            words = [sys.executable, str(hangs)]
        return start(words, **named)

    monkeypatch.setattr(chaos_bench.subprocess, "Popen", popen)
    monkeypatch.setattr(chaos_bench, "_START_SECONDS", 1.0)
    short = replace(scenario_of("kill"), limit_seconds=1.0)
    monkeypatch.setattr(chaos_bench, "scenario_of", lambda name: short)
    (found,) = chaos(cases=["kill"])
    assert found.verdict == "failed: not over within 2 s"
    assert "sleep 99" not in descendants().values()


def test_rows_are_times_over_what_is_allowed():
    rows = rows_of([finding("kill")])
    assert [(r.case, r.value, r.baseline) for r in rows] == [
        ("kill: longest gap between steps", 0.4, 1.5),
        ("kill: all workers back", 6.0, 10.0),
    ]
    not_run = replace(finding("disk-full", "not run: root only"), weights_alike=None)
    assert "not run: root only" in table([not_run])


@pytest.mark.cluster
def test_a_killed_worker_and_a_drained_node_cost_nothing_on_a_real_cluster(tmp_path):
    """The replacement's place is on the node that drains: others are found. Times are not judged.

    A machine that is busy with other things may take longer than the table allows.
    """
    words = ["bench", "chaos", "--case", "drain-replaced", "--json", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, words)
    assert '"case": "drain-replaced: longest gap between steps"' in done.stdout, done.output
    found = json.loads((tmp_path / "elasticity.jsonl").read_text())
    assert not found["verdict"].startswith("failed"), found
    assert (found["samples_lost"], found["samples_repeated"], found["strays"]) == (0, 0, 0)
    assert found["weights_alike"]
    assert found["steps_repeated"] == 0
    assert any("joined" in line for line in found["told"][-2:])
    assert done.exit_code == (found["verdict"] != "as expected")


def test_hosts_that_nobody_cleared_up_are_removed():
    words = ["ip", "netns", "add", "apc-host77"]
    if shutil.which("ip") is None or subprocess.run(words, check=False).returncode:
        pytest.skip("network namespaces need root, ip and a kernel with them")
    clear_hosts()
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    assert "apc-host77" not in listed.stdout
