"""Makes the screenshots of the guides: a cluster, a submitted job, its dashboard and pages.

    python docs/screenshots.py [FOLDER] [job] [sweep]

Needs Chromium. The cluster is one node on this machine, without token authentication since the
browser has no token, and is ended afterwards.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
RAY = [sys.executable, "-c", "import sys; from ray.scripts.scripts import main; sys.exit(main())"]
COMMAND = [sys.executable, "-m", "adaptive_platform"]


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port: int = held.getsockname()[1]
    return port


def wait_for(url: str, seconds: float = 60.0) -> None:
    """Return once something answers."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            urllib.request.urlopen(url, timeout=2).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def photograph(url: str, target: Path, profile: str, height: int = 1000) -> None:
    """What the browser shows some seconds after the page was opened."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("Chromium is not installed (Debian package `chromium`)")
    subprocess.run(
        [
            browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            f"--user-data-dir={profile}", f"--window-size=1400,{height}",
            "--virtual-time-budget=12000",
            f"--screenshot={target}", url,
        ],
        check=True, capture_output=True, timeout=90,
    )  # fmt: skip
    print(target)


@contextmanager
def cluster(work: str) -> Iterator[tuple[str, dict[str, str]]]:
    """A head node with dashboard; its address, and the environment to reach it in."""
    port, board = free_port(), free_port()
    environment = os.environ | {
        "RAY_AUTH_MODE": "disabled",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    head = subprocess.Popen(
        [
            *RAY, "start", "--head", "--block", "--num-cpus=2", f"--port={port}",
            f"--dashboard-port={board}", "--object-store-memory=150000000",
            "--disable-usage-stats", f"--temp-dir={work}/ray",
        ],
        env=environment, stdout=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        address = f"http://127.0.0.1:{board}"
        wait_for(address)
        yield address, environment
    finally:
        os.killpg(head.pid, signal.SIGTERM)
        head.wait(90)


def photograph_job(out: Path, work: str) -> None:
    """A submitted run in Ray's dashboard, and its report at the end."""
    profile = f"{work}/profile"
    with cluster(work) as (address, environment):
        submit = [sys.executable, str(ROOT / "experiments/examples/submit_job.py"), address]
        variables = [f"--env=PYTHONPATH={ROOT}", "--env=OMP_NUM_THREADS=1"]
        job = subprocess.Popen(
            [*submit, *variables, "--id=quickstart", "--", *COMMAND, "train", "quickstart",
             "model.name=resnet8_cifar", f"out={work}/quickstart"],
            env=environment, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert job.stdout is not None
        for line in job.stdout:
            if "step " in line and "loss" in line:
                break
        for name in ("jobs", "actors"):
            photograph(f"{address}/#/{name}", out / f"ray-{name}.png", profile)
        job.communicate()
        photograph(f"file://{work}/quickstart/report.html", out / "report.png", profile, 1900)


def photograph_sweep(out: Path, work: str) -> None:
    """The page of a small sweep."""
    subprocess.run(
        [*COMMAND, "sweep", "large-batch-ladder", "stop.epochs=2", f"out={work}/sweep"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, check=True,
    )  # fmt: skip
    photograph(f"file://{work}/sweep/sweep.html", out / "sweep.png", f"{work}/profile", 1500)


PARTS = {"job": photograph_job, "sweep": photograph_sweep}


def main() -> None:
    """Make the pictures of the parts that were named, or of all."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the cluster is ended as well
    out = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "docs")
    out.mkdir(parents=True, exist_ok=True)
    for part in sys.argv[2:] or PARTS:
        with tempfile.TemporaryDirectory() as work:
            PARTS[part](out, work)


if __name__ == "__main__":
    main()
