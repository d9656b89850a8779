"""Jobs (F31): status, exit code and log tell the truth, a stopped job saves, a client may leave."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from adaptive_platform.checkpoints.store import CheckpointStore

ROOT = Path(__file__).parents[2]
SUBMIT = [sys.executable, str(ROOT / "experiments" / "examples" / "submit_job.py")]
RAY = [sys.executable, "-c", "import sys; from ray.scripts.scripts import main; sys.exit(main())"]


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port: int = held.getsockname()[1]
    return port


class Cluster:
    """A head node of our own with the jobs API, under token authentication."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._token = f"token-of-this-test-{os.getpid()}-0123456789"
        port, self._dashboard = free_port(), free_port()
        # Unix sockets lie below it, and their names may not be long.
        self._temp = Path(f"/tmp/ap-jobs-{os.getpid()}")
        self._environment = os.environ | {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self._token,
            "RAY_ADDRESS": f"127.0.0.1:{port}",
            "OMP_NUM_THREADS": "1",
        }
        self._head = subprocess.Popen(
            [
                *RAY, "start", "--head", "--block", "--num-cpus=3", f"--port={port}",
                f"--dashboard-port={self._dashboard}", "--dashboard-agent-listen-port=0",
                "--object-store-memory=150000000",
                "--disable-usage-stats", f"--temp-dir={self._temp}",
            ],
            env={k: v for k, v in self._environment.items() if k != "RAY_ADDRESS"},
            stdout=(folder / "head.log").open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        deadline = time.monotonic() + 150
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._dashboard), timeout=1).close()
                break
            except OSError:
                assert time.monotonic() < deadline, (folder / "head.log").read_text()
                time.sleep(0.5)

    @property
    def address(self) -> str:
        """Where jobs are submitted."""
        return f"http://127.0.0.1:{self._dashboard}"

    def environment(self, *without: str) -> dict[str, str]:
        """Of a client, without some variables."""
        return {k: v for k, v in self._environment.items() if k not in without}

    def submit(self, name: str, *command: str) -> subprocess.Popen[str]:
        """The submitting client; its output and exit code are the job's."""
        return subprocess.Popen(
            [
                *SUBMIT, self.address, f"--id={name}",
                f"--env=PYTHONPATH={ROOT}", "--env=OMP_NUM_THREADS=1", "--", sys.executable,
                *command,
            ],
            env=self.environment("RAY_AUTH_MODE"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )  # fmt: skip

    def job(self, *words: str) -> str:
        """Output of `ray job ...`."""
        result = subprocess.run(
            [*RAY, "job", *words, f"--address={self.address}"],
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=90,
        )
        return result.stdout + result.stderr

    def workers(self) -> list[str]:
        """Processes of this cluster that train."""
        return [title for title in self._processes().values() if "TrainWorker" in title]

    def close(self) -> None:
        """End the node and whatever it started; nothing of it is worth a farewell."""
        for number in self._processes():
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        self._head.wait(30)
        shutil.rmtree(self._temp, ignore_errors=True)

    def _processes(self) -> dict[int, str]:
        """Processes with this cluster's token in their environment, and what they are called."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if self._token.encode() in (folder / "environ").read_bytes():
                    title = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                    found[int(folder.name)] = title.decode(errors="replace")
        return found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    made = Cluster(tmp_path_factory.mktemp("jobs"))
    yield made
    made.close()


@pytest.mark.cluster
def test_jobs_end_as_their_runs_end(cluster):
    """One fails at its third step, one loses its worker and recovers though its client is gone."""
    script = str(Path(__file__).with_name("job_run.py"))
    leaving = cluster.submit("recovers", script, "recovers", str(cluster.folder))
    failing = cluster.submit("fails", script, "fails", str(cluster.folder))
    assert leaving.stdout is not None
    assert "submitted recovers" in leaving.stdout.readline()
    leaving.kill()
    leaving.wait()
    output, _ = failing.communicate(timeout=150)
    assert failing.returncode == 1, output
    assert "FAILED" in output
    assert "step three is cursed" in output
    deadline = time.monotonic() + 150
    while "succeeded" not in cluster.job("status", "recovers").lower():
        assert time.monotonic() < deadline, cluster.job("logs", "recovers")
        time.sleep(1)
    assert (cluster.folder / "killed").exists()
    assert "ended done after 6 steps" in cluster.job("logs", "recovers")
    result = json.loads((cluster.folder / "recovers" / "result.json").read_text())
    assert (result["status"], result["steps"]) == ("done", 6)


@pytest.mark.cluster
def test_a_stopped_job_leaves_a_checkpoint_and_no_workers(cluster):
    out = cluster.folder / "stopped"
    client = cluster.submit(
        "stopped", "-m", "adaptive_platform", "train", "quickstart", "model.name=resnet8_cifar",
        "workers=1", "stop.epochs=1000", "checkpoint.every=100000 steps", f"out={out}",
    )  # fmt: skip
    assert client.stdout is not None
    seen = []
    for line in client.stdout:
        seen.append(line)
        if "step " in line and "loss" in line:
            break
    assert cluster.workers(), "".join(seen)
    cluster.job("stop", "stopped")
    output, _ = client.communicate(timeout=120)
    assert client.returncode == 3, "".join(seen) + output
    assert "STOPPED" in output
    assert cluster.workers() == []
    found = CheckpointStore(str(out)).load_newest()
    assert found is not None
    assert json.loads((out / "result.json").read_text())["status"] == "interrupted"


@pytest.mark.cluster
def test_the_line_of_the_readme_as_it_stands(cluster, tmp_path):
    """In a shell in the checkout; another address, folder, size, and names of the programs."""
    (block,) = re.findall(
        r"```bash\n(export RAY_API_SERVER_ADDRESS.*?)```", (ROOT / "README.md").read_text(), re.S
    )
    out = tmp_path / "run"
    for word, ours in {
        "http://127.0.0.1:8265": cluster.address,
        "ray job submit": f"{shlex.join(RAY)} job submit --submission-id readme",
        "-- python": f"-- {shlex.quote(sys.executable)}",
        "out=/shared/run1": f"out={out} model.name=resnet8_cifar workers=1 stop.epochs=1000",
    }.items():
        assert word in block
        block = block.replace(word, ours)
    client = subprocess.Popen(
        ["bash", "-c", block], cwd=ROOT, env=cluster.environment("RAY_AUTH_MODE"),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert client.stdout is not None
    seen = []
    for line in client.stdout:
        seen.append(line)
        if "step " in line and "loss" in line:
            break
    assert cluster.workers(), "".join(seen)
    cluster.job("stop", "readme")
    output, _ = client.communicate(timeout=120)
    assert client.returncode == 0, "".join(seen) + output
    assert "was stopped" in output
    assert cluster.workers() == []
    found = CheckpointStore(str(out)).load_newest()
    assert found is not None
    assert json.loads((out / "result.json").read_text())["status"] == "interrupted"
