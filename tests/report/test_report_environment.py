"""Environment of a run: written, read back, shown."""

from __future__ import annotations

import json
import platform

from report_examples import write_run

from adaptive_platform.report.environment import describe_environment, write_environment
from adaptive_platform.report.html import render_html
from adaptive_platform.report.run_data import read_run

CLUSTER = {
    "CPU": 8.0, "GPU": 2.0, "node:10.0.0.1": 1.0, "node:10.0.0.2": 1.0,
    "node:__internal_head__": 1.0, "accelerator_type:H200": 1.0, "memory": 1e9,
}  # fmt: skip


def test_the_cluster_in_words():
    found = describe_environment(CLUSTER)
    assert found["cluster"] == "2 node(s), 8 CPU, 2 GPU"
    assert found["accelerators"] == "H200"
    assert found["Python"] == platform.python_version()
    assert {"torch", "ray"} <= set(found)
    assert "accelerators" not in describe_environment({"CPU": 1.0})


def test_it_is_read_back_and_shown_beside_each_other(tmp_path):
    for name, torch in (("one", "2.9"), ("two", "2.<b>")):
        write_run(tmp_path / name, steps=20)
        write_environment(tmp_path / name, {"torch": torch})
    runs = [read_run(tmp_path / name) for name in ("one", "two")]
    assert runs[0].environment == {"torch": "2.9"}
    text = render_html(runs)
    assert "<h2>Environment</h2>" in text
    assert "<td>2.9</td><td>2.&lt;b&gt;</td>" in text
    assert json.loads((tmp_path / "one" / "environment.json").read_text()) == {"torch": "2.9"}


def test_runs_of_older_versions_have_none(tmp_path):
    write_run(tmp_path / "run", steps=20)
    run = read_run(tmp_path / "run")
    assert run.environment == {}
    assert "Environment" not in render_html([run]).split("<script")[0]
