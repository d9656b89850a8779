"""The benchmark of reductions, on two processes and tiny messages."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from adaptive_platform.bench.collectives import collectives
from adaptive_platform.cli import app
from adaptive_platform.collectives import AutoConfig


def test_every_plan_has_a_row_and_the_links_are_written(tmp_path) -> None:
    path = tmp_path / "links.yaml"
    rows = collectives(quick=True, out=str(path), workers=(2,), sizes={"4 KB": 4000})
    cases = {row.case: row for row in rows}
    for kind in ("torus", "ring", "tree", "hierarchical", "halving_doubling", "parameter_server"):
        row = cases[f"2 workers, 4 KB: {kind}"]
        assert row.repeats == 3
        assert row.baseline is not None
        assert row.value > 0
    found = AutoConfig.model_validate({"links": str(path)}).links
    assert found.remote.bytes_per_second == cases["2 workers: bandwidth (1/beta)"].value


def test_out_belongs_to_collectives(tmp_path) -> None:
    result = CliRunner().invoke(app, ["bench", "overhead", "--out", str(tmp_path / "x")])
    assert "--out" in str(result.exception)


def test_links_from_a_broken_file_are_refused(tmp_path) -> None:
    path = tmp_path / "links.yaml"
    path.write_text("remote: {latency_seconds: -1, bytes_per_second: 1}")
    with pytest.raises(ValueError, match="latency_seconds"):
        AutoConfig.model_validate({"links": str(path)})
