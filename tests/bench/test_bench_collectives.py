"""The benchmark of reductions, on two processes and tiny messages."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from adaptive_platform.bench.collectives import collectives, read_sizes
from adaptive_platform.bench.processes import run_group
from adaptive_platform.cli import app
from adaptive_platform.collectives import AutoConfig, Membership
from adaptive_platform.errors import RunFailedError, UserError


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
    assert found is not None
    assert found.remote.bytes_per_second == cases["2 workers: bandwidth (1/beta)"].value


def test_out_belongs_to_collectives(tmp_path) -> None:
    result = CliRunner().invoke(app, ["bench", "overhead", "--out", str(tmp_path / "x")])
    assert result.exit_code == 2
    assert "No such option" in result.output


def test_links_from_a_broken_file_are_refused(tmp_path) -> None:
    path = tmp_path / "links.yaml"
    path.write_text("remote: {latency_seconds: -1, bytes_per_second: 1}")
    with pytest.raises(ValueError, match="latency_seconds"):
        AutoConfig.model_validate({"links": str(path)})


def test_crowds_are_forked_and_sizes_are_read() -> None:
    rows = collectives(quick=True, workers=(6,), sizes=read_sizes(["4 kb"]), plans=("torus",))
    assert "6 workers, 4 KB: torus" in {row.case for row in rows}
    with pytest.raises(UserError, match="--plan = square"):
        collectives(quick=True, plans=("square",))


@pytest.mark.parametrize(
    ("word", "size"), [("64KB", 64_000), ("1 MB", 10**6), ("2.5mb", 2_500_000), ("8B", 8)]
)
def test_sizes(word: str, size: int) -> None:
    assert list(read_sizes([word]).values()) == [size]


@pytest.mark.parametrize("word", ["64", "KB", "1B", "-3MB", "4 MiB"])
def test_sizes_that_are_none(word: str) -> None:
    with pytest.raises(UserError, match="--size"):
        read_sizes([word])


def test_a_process_that_dies_is_named() -> None:
    with pytest.raises(RunFailedError, match="process 1 ended without a result"):
        run_group(2, _dies_on_one, fresh=False)


def _dies_on_one(membership: Membership) -> None:
    if membership.rank == 1:
        os._exit(3)
    time.sleep(60)


def test_nothing_is_left_when_the_benchmark_is_ended() -> None:
    script = (
        "from adaptive_platform.bench.processes import run_group\n"
        "from test_bench_collectives import sleeps\n"
        "if __name__ == '__main__':\n"
        "    run_group(2, sleeps, fresh=False)\n"
    )
    folder = str(Path(__file__).parent)
    paths = os.pathsep.join([folder, str(Path(folder).parents[1])])
    bench = subprocess.Popen(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert bench.stdout is not None
    workers = [int(bench.stdout.readline()) for _ in range(2)]
    bench.kill()
    bench.wait()
    for _ in range(200):
        left = [pid for pid in workers if _runs(pid)]
        if not left:
            break
        time.sleep(0.1)
    assert not left


def test_forked_processes_find_imported_what_the_main_module_imports(tmp_path) -> None:
    main = tmp_path / "main.py"
    main.write_text(
        "import sys\n"
        "FOUND = 'adaptive_platform.bench.rate_plans' in sys.modules\n"
        "import adaptive_platform.bench.rate_plans\n"
        "from adaptive_platform.bench.processes import run_group\n"
        "from test_bench_collectives import found_in_main\n"
        "if __name__ == '__main__':\n"
        "    print(FOUND, *run_group(2, found_in_main, fresh=False))\n"
    )
    folder = str(Path(__file__).parent)
    paths = os.pathsep.join([folder, str(Path(folder).parents[1])])
    said = subprocess.run(
        [sys.executable, main], env=os.environ | {"PYTHONPATH": paths}, capture_output=True
    )
    assert said.stdout.split() == [b"False", b"True", b"True"], said.stderr


def found_in_main(membership: Membership) -> bool:
    return sys.modules["__mp_main__"].FOUND


def sleeps(membership: Membership) -> None:
    print(os.getpid(), flush=True)
    time.sleep(120)


def _runs(pid: int) -> bool:
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except FileNotFoundError:
        return False
