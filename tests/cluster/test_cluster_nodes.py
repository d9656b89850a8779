"""Several Ray nodes on one machine: joining by address, rows of the torus, a node that dies."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pandas as pd
import pytest
import ray
from ray.cluster_utils import Cluster

from adaptive_platform.recipe import load_recipe

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.cluster


@pytest.fixture
def two_nodes():
    """A head without CPUs and two nodes of 2 CPUs; this process does not join."""
    if ray.is_initialized():
        ray.shutdown()
    settings = {"object_store_memory": 100 * 2**20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **settings})
    nodes = [cluster.add_node(num_cpus=2, object_store_memory=100 * 2**20) for _ in range(2)]
    yield cluster, nodes
    cluster.shutdown()


def command(cluster: Cluster, *words: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "adaptive_platform",
        "train",
        "quickstart",
        "--address",
        cluster.address,
        "model.name=resnet8_cifar",
        "report.html=false",
        *words,
    ]


def environment() -> dict[str, str]:
    return os.environ | {
        "PYTHONPATH": str(ROOT),
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
        "COLUMNS": "200",
    }


def test_torus_rows_are_nodes_and_a_dead_node_is_survived(two_nodes, tmp_path):
    """`workers=[2,4]` on 2 + 2 CPUs; one node is removed; two workers finish the run."""
    cluster, nodes = two_nodes
    run_dir = tmp_path / "run"
    removed = []

    process = subprocess.Popen(
        command(
            cluster,
            f"out={run_dir}",
            "workers=[2,4]",
            "reducer.kind=torus",
            "lr_rule.kind=none",
            "batch.kind=fixed",
            "batch.global_batch=16",
            "checkpoint.every=10 steps",
            "stop.steps=60",
            "report.evaluate_every=1000 steps",
            "reducer.timeout_seconds=10",
        ),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not list(run_dir.glob("checkpoints/step-*")) and time.monotonic() < deadline:
        time.sleep(0.2)
    cluster.remove_node(nodes[1], allow_graceful=False)
    removed.append(time.time())
    lines: list[str] = []
    reader = threading.Thread(
        target=lambda: [lines.append(line) for line in process.stdout], daemon=True
    )
    reader.start()
    assert process.wait(240) == 0, "".join(lines)
    steps = pd.read_parquet(run_dir / "steps")
    assert steps.step.tolist() == list(range(1, 61))
    assert steps.world_size.iloc[0] == 4
    assert steps.world_size.iloc[-1] == 2
    assert set(steps.global_batch) <= {16, 1442 % 16}
    events = pd.read_parquet(run_dir / "events")
    plans = events.text[events.text.str.contains("summed by")].tolist()
    assert "2 x 2" in plans[0], plans


def test_links_are_measured_on_the_clusters_own_workers(two_nodes, tmp_path):
    cluster, _ = two_nodes
    table = tmp_path / "links.yaml"
    words = [sys.executable, "-m", "adaptive_platform", "bench", "collectives", "--json"]
    words += ["--address", cluster.address, "--workers", "4", "--out", str(table)]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "local bandwidth" in done.stdout, "two workers on each of two nodes have both links"
    recipe = load_recipe("quickstart", [f"reducer.links={table}"])
    assert recipe.reducer.links.local is not None
    assert recipe.reducer.plan(4, list("aabb")).world_size == 4
