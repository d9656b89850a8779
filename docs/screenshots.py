"""Makes the screenshots of the guides: a cluster, a submitted job, its dashboard and pages.

    python docs/screenshots.py [FOLDER]

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
from pathlib import Path

ROOT = Path(__file__).parents[1]
RAY = [sys.executable, "-c", "import sys; from ray.scripts.scripts import main; sys.exit(main())"]
SMALL = ["model.name=resnet8_cifar", "workers=1"]


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


def main() -> None:
    """Start, run, photograph, end."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the cluster is ended as well
    out = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "docs")
    out.mkdir(parents=True, exist_ok=True)
    port, board = free_port(), free_port()
    with tempfile.TemporaryDirectory() as work:
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
            command = [sys.executable, "-m", "adaptive_platform"]
            submit = [sys.executable, str(ROOT / "experiments/examples/submit_job.py"), address]
            variables = [f"--env=PYTHONPATH={ROOT}", "--env=OMP_NUM_THREADS=1"]
            job = subprocess.Popen(
                [*submit, *variables, "--id=quickstart", "--", *command, "train", "quickstart",
                 *SMALL, "stop.epochs=60", f"out={work}/run"],
                env=environment, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            assert job.stdout is not None
            for line in job.stdout:
                if "step " in line and "loss" in line:
                    break
            for name in ("jobs", "actors"):
                photograph(f"{address}/#/{name}", out / f"ray-{name}.png", f"{work}/profile")
            subprocess.run(
                [*RAY, "job", "stop", "quickstart", f"--address={address}"],
                env=environment, check=True, capture_output=True,
            )  # fmt: skip
            job.wait(120)
            photograph(
                f"file://{work}/run/report.html", out / "report.png", f"{work}/profile", 1900
            )
            subprocess.run(
                [*command, "sweep", "warmup-lars", f"address=127.0.0.1:{port}", "budget.trials=8",
                 "stop.epochs=4", "report.evaluate_every=1 epochs", f"out={work}/sweep"],
                env=environment, check=True,
            )  # fmt: skip
            page = f"file://{work}/sweep/sweep.html"
            photograph(page, out / "sweep.png", f"{work}/profile", 1500)
        finally:
            os.killpg(head.pid, signal.SIGTERM)
            head.wait(60)


if __name__ == "__main__":
    main()
