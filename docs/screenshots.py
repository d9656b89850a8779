"""Makes every picture in this folder: runs, a sweep, a cluster with a submitted job, their pages.

    python docs/screenshots.py [FOLDER] [quickstart] [job] [sweep] [torus]

Needs Chromium and Prometheus (Debian packages `chromium` and `prometheus`), and matplotlib. The
cluster is one node on this machine, without token authentication since the browser has no token,
and is ended afterwards. All parts together take about ten minutes on two cores.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[1]
RAY = [sys.executable, "-c", "import sys; from ray.scripts.scripts import main; sys.exit(main())"]
COMMAND = [sys.executable, "-m", "adaptive_platform"]
MOST_BYTES = 200_000
WATCH_SECONDS = 110.0
"""How long Prometheus watches the run before its page is taken."""


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


def photograph(url: str, target: Path, profile: str, height: int, width: int = 1400) -> None:
    """What the browser shows some seconds after the page was opened, in 64 colours."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("Chromium is not installed (Debian package `chromium`)")
    subprocess.run(
        [
            browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            f"--user-data-dir={profile}", f"--window-size={width},{height}",
            "--virtual-time-budget=12000",
            f"--screenshot={target}", url,
        ],
        check=True, capture_output=True, timeout=90,
    )  # fmt: skip
    shrink(target)


def shrink(target: Path) -> None:
    """Store a picture in 64 colours, and insist that it is small enough for a repository."""
    picture = Image.open(target).convert("RGB").quantize(64, dither=Image.Dither.NONE)
    picture.save(target, optimize=True)
    size = target.stat().st_size
    if size > MOST_BYTES:
        sys.exit(f"{target} has {size} bytes, more than {MOST_BYTES}: show less of the page")
    print(target, size, "bytes")


@contextmanager
def running(words: list[str], environment: dict[str, str], url: str) -> Iterator[None]:
    """A server that answers at the address, and is ended with all that it started."""
    server = subprocess.Popen(
        words,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        wait_for(url)
        yield
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(90)


@contextmanager
def cluster(work: str) -> Iterator[tuple[str, str, dict[str, str]]]:
    """A head node and Prometheus: dashboard, Prometheus's address, and the environment for both."""
    port, board, watch = free_port(), free_port(), free_port()
    environment = os.environ | {
        "RAY_AUTH_MODE": "disabled",
        "RAY_PROMETHEUS_HOST": f"http://127.0.0.1:{watch}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        # A job's `python` is that of the shell that ran `ray start`.
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    head = [
        *RAY, "start", "--head", "--block", "--num-cpus=2", f"--port={port}",
        f"--dashboard-port={board}", "--dashboard-agent-listen-port=0",
        "--object-store-memory=150000000",
        "--disable-usage-stats", f"--temp-dir={work}/ray",
    ]  # fmt: skip
    ours = f"http://127.0.0.1:{watch}"
    with running(head, environment, f"http://127.0.0.1:{board}"):
        prometheus = [
            "prometheus", f"--storage.tsdb.path={work}/prometheus",
            f"--web.listen-address=127.0.0.1:{watch}",
            f"--config.file={work}/ray/session_latest/metrics/prometheus/prometheus.yml",
        ]  # fmt: skip
        with running(prometheus, environment, f"{ours}/-/ready"):
            yield f"http://127.0.0.1:{board}", ours, environment


def draw_quickstart(out: Path, work: str) -> None:
    """The curves of the README's first command."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for words in (
        ["train", "quickstart", "out=runs/quickstart"],
        ["report", "runs/quickstart", "--format", "png", "--out", str(out / "quickstart.png")],
    ):
        subprocess.run([*COMMAND, *words], env=environment, cwd=work, check=True)
    shrink(out / "quickstart.png")


def draw_torus(out: Path, work: str) -> None:
    """The grid of the README."""
    script = str(Path(__file__).with_name("torus.py"))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run(
        [sys.executable, script, str(out / "torus.svg")], env=environment, cwd=work, check=True
    )


def photograph_job(out: Path, work: str) -> None:
    """A submitted run in Ray's dashboard and in Prometheus, and its report while it goes on."""
    profile = f"{work}/profile"
    with cluster(work) as (board, prometheus, environment):
        submit = [sys.executable, str(ROOT / "experiments/examples/submit_job.py"), board]
        variables = [f"--env=PYTHONPATH={ROOT}", "--env=OMP_NUM_THREADS=1"]
        job = subprocess.Popen(
            [*submit, *variables, "--id=quickstart", "--", "python", "-m", "adaptive_platform",
             "train", "quickstart", "model.name=resnet8_cifar", "stop.epochs=60",
             "optimizer.lr=0.1", f"out={work}/runs/first"],
            env=environment, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert job.stdout is not None
        for line in job.stdout:
            if "step " in line and "loss" in line:
                break
        begun = time.monotonic()
        with urllib.request.urlopen(f"{board}/api/jobs/quickstart", timeout=10) as answer:
            number = json.load(answer)["job_id"]
        photograph(f"{board}/#/jobs", out / "ray-jobs.png", profile, 620, 1560)
        photograph(f"{board}/#/jobs/{number}", out / "ray-job.png", profile, 1000)
        time.sleep(max(0.0, WATCH_SECONDS - (time.monotonic() - begun)))
        words = {}
        for at, name in enumerate(("train_accuracy", "goodput")):
            query = f"max by (run) (ray_adaptive_{name})"
            words |= {f"g{at}.expr": query, f"g{at}.tab": "0", f"g{at}.range_input": "2m"}
        address = f"{prometheus}/graph?{urllib.parse.urlencode(words)}"
        photograph(address, out / "prometheus.png", profile, 1540)
        if job.poll() is not None:
            sys.exit(f"the job ended before its pictures were made: {job.stdout.read()}")
        subprocess.run([*COMMAND, "report", "runs/first"], env=environment, cwd=work, check=True)
        photograph(f"file://{work}/runs/first/report.html", out / "report.png", profile, 1500)
        job.terminate()  # only its client; the job ends with the cluster
        job.communicate()


def photograph_sweep(out: Path, work: str) -> None:
    """The page of a shipped sweep."""
    subprocess.run(
        [*COMMAND, "sweep", "controllers", "out=sweeps/a"], cwd=work,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, check=True,
    )  # fmt: skip
    photograph(f"file://{work}/sweeps/a/sweep.html", out / "sweep.png", f"{work}/profile", 1500)


PARTS = {
    "quickstart": draw_quickstart,
    "job": photograph_job,
    "sweep": photograph_sweep,
    "torus": draw_torus,
}


def main() -> None:
    """Make the pictures of the parts that were named, or of all."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the cluster is ended as well
    out = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "docs").absolute()
    out.mkdir(parents=True, exist_ok=True)
    for part in sys.argv[2:] or PARTS:
        with tempfile.TemporaryDirectory(prefix="ap-") as work:
            PARTS[part](out, work)


if __name__ == "__main__":
    main()
