"""Live metrics end to end: a run, Ray's export, a real Prometheus, every panel's query."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path

import pytest

from adaptive_platform.report.dashboards import alert_rules, dashboards, queries

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def prometheus() -> str:
    """Prometheus's binary, installed where this may be done; else the tests ask for it."""
    if shutil.which("prometheus") is None and hasattr(os, "geteuid") and os.geteuid() == 0:
        for words in (["update"], ["install", "-y", "--no-install-recommends", "prometheus"]):
            try:
                subprocess.run(
                    ["apt-get", "-q", *words], capture_output=True, check=False, timeout=120
                )
            except (FileNotFoundError, subprocess.TimeoutExpired):
                break
    found = shutil.which("prometheus")
    if found is None:
        pytest.skip("no Prometheus here and none could be installed (Debian package `prometheus`)")
    return found


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port: int = held.getsockname()[1]
    return port


class Prometheus:
    """A Prometheus of our own that scrapes one port each second."""

    def __init__(self, binary: str, folder: Path, target: int) -> None:
        self._port = free_port()
        rules = ROOT / "dashboards" / "prometheus" / "adaptive_platform.rules.yml"
        (folder / "prometheus.yml").write_text(
            "global: {scrape_interval: 1s, evaluation_interval: 1s}\n"
            f"rule_files: ['{rules}']\n"
            "scrape_configs:\n"
            f"- {{job_name: ray, static_configs: [{{targets: ['127.0.0.1:{target}']}}]}}\n"
        )
        self._process = subprocess.Popen(
            [
                binary,
                f"--config.file={folder}/prometheus.yml",
                f"--storage.tsdb.path={folder}/tsdb",
                f"--web.listen-address=127.0.0.1:{self._port}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def get(self, path: str, **words: str) -> dict:
        url = f"http://127.0.0.1:{self._port}/api/v1/{path}?{urllib.parse.urlencode(words)}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            content: dict = json.load(answer)
        return content["data"]

    def values(self, query: str) -> list[float]:
        try:
            return [float(row["value"][1]) for row in self.get("query", query=query)["result"]]
        except OSError:
            return []

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(20)


def panel_queries() -> dict[str, str]:
    """Every query of every dashboard, with its variables filled in as Grafana would."""
    found = {}
    for name, board in dashboards().items():
        for query in queries(board):
            filled = query.replace("$__rate_interval", "10s")
            filled = filled.replace("$run", ".*").replace("$sweep", ".*")
            assert "$" not in filled
            found[f"{name}: {query}"] = filled
    return found


@pytest.mark.cluster
def test_every_panel_shows_data_and_nothing_stays_behind(prometheus, tmp_path):
    port = free_port()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with open(tmp_path / "log", "w") as log:
        run = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("metrics_run.py")), str(port), tmp_path],
            env=environment,
            stdout=log,
            stderr=log,
        )
    server = Prometheus(prometheus, tmp_path, port)
    try:
        left = panel_queries()
        deadline = time.monotonic() + 120
        while left:
            assert run.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline, f"without data: {sorted(left)}"
            time.sleep(1)
            left = {name: query for name, query in left.items() if not server.values(query)}
        (group,) = server.get("rules")["groups"]
        wanted = {rule["alert"] for rule in alert_rules()["groups"][0]["rules"]}
        assert {rule["name"] for rule in group["rules"]} == wanted
        assert {rule["health"] for rule in group["rules"]} == {"ok"}
        assert server.values("ray_adaptive_world_size") == [2.0]
        steps = server.values("ray_adaptive_step_duration_seconds_count")
        assert steps[0] >= 1
        assert server.values("ray_adaptive_eval_accuracy")[0] <= 1.0
        assert server.values("ray_adaptive_checkpoint_seconds")[0] > 0.0
        age = server.values("time() - ray_adaptive_last_checkpoint_time")[0]
        assert 0.0 <= age < 600.0
        deadline = time.monotonic() + 60
        while server.values("ray_adaptive_stragglers") != [1.0]:
            assert time.monotonic() < deadline, "the slow worker was not noticed"
            time.sleep(1)
        firing = "ALERTS{alertname='AdaptiveRunSlowWorker'}"
        while not server.values(firing):
            assert time.monotonic() < deadline, "nobody is told of the slow worker"
            time.sleep(1)

        (tmp_path / "stop").touch()
        deadline = time.monotonic() + 180
        while server.values("ray_adaptive_progress"):
            assert time.monotonic() < deadline, "the gauges of a run that ended are still there"
            time.sleep(1)
        assert (tmp_path / "ended").exists()
        stale = [name for name, query in panel_queries().items() if server.values(query)]
        assert stale == []
    finally:
        (tmp_path / "end").touch()
        server.close()
        run.wait(60)
