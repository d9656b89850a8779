"""One side of `bench recovery`: a run whose worker is killed a few times, and what that cost.

    python -m adaptive_platform.bench.recovery_sides SIDE KILLS FOLDER

Prints one JSON object with a list per figure, one entry per kill.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import ray

from adaptive_platform.bench import recovery_loops
from adaptive_platform.bench.faults import Network, Orders, PacedLoss, Points
from adaptive_platform.bench.invariants import next_step, recipe, until_full
from adaptive_platform.bench.stage import adopt_orphans, leave_with_parent, workers
from adaptive_platform.cluster.launch import launch
from adaptive_platform.cluster.mailbox import Message
from adaptive_platform.errors import RunFailedError

__all__ = ["SIDES"]

_BETWEEN_STEPS = 25
"""Steps from one recovery to the next kill, so that it does not fall on a checkpoint."""
_PATIENCE_SECONDS = 120.0
_LOOK_SECONDS = 0.05
_OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""A store of its own for each start of the workers. With the agent's, which outlives them and keeps
the addresses of their predecessors under the same names, PyTorch 2.14 often can't meet again."""
_RAY = {
    "address": "local",
    "num_cpus": 4,
    "include_dashboard": False,
    "log_to_driver": False,
    "logging_level": "ERROR",
    "object_store_memory": 128 * 2**20,
}


def _wait(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise RunFailedError(f"{what} did not happen in {_PATIENCE_SECONDS:.0f} s")
        time.sleep(_LOOK_SECONDS)


@dataclass(slots=True)
class _Watch:
    step: int = 0
    pids: tuple[int, ...] = ()
    heard: list[str] = field(default_factory=list)
    stop: bool = False

    def __call__(self, messages: list[Message]) -> bool:
        for kind, fields, _ in messages:
            if kind == "step":
                self.step = fields["step"]
            elif kind == "event":
                self.heard.append(fields["kind"])
            elif kind == "members":
                self.pids = fields["pids"]
        return self.stop


def _ours(kills: int, folder: Path, *, live: bool) -> dict[str, list[float]]:
    os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "0.5"  # as a run on its own sets it
    os.environ["RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"] = "0"
    ray.init(**_RAY)
    number = recovery_loops.WORKERS
    config = recipe(
        str(folder / "run"),
        (number, number),
        f"membership.live={str(live).lower()}",
        f"checkpoint.every={recovery_loops.CHECKPOINT_STEPS} steps",
        "reducer.kind=ring",
    )
    watch = _Watch()
    run = threading.Thread(
        target=partial(
            launch,
            config,
            watch=watch,
            model=Network,
            train_data=Points(),
            loss=PacedLoss(),
        ),
        daemon=True,
    )
    run.start()
    done = []
    back = "joined" if live else "resume"
    from_step = 0
    for number in range(kills):

        def ready(since: int = from_step) -> bool:
            there = len(watch.pids) == 2 if live else len(workers()) == 2
            return there and watch.step >= since + _BETWEEN_STEPS

        _wait(ready, f"kill {number + 1}")
        done.append(time.time())
        os.kill(watch.pids[-1] if live else max(workers()), signal.SIGKILL)
        _wait(lambda n=number: watch.heard.count(back) > n, f"recovery {number + 1}")  # type: ignore[misc]
        watch.pids = ()  # those that are known from before
        from_step = watch.step  # a restart counts its steps from the checkpoint on
    _wait(lambda: watch.step >= from_step + _BETWEEN_STEPS, "calm steps")
    watch.stop = True
    run.join(_PATIENCE_SECONDS)
    directory = folder / "run"
    found = {"next step": [next_step(directory, when) for when in done]}
    if live:
        found["replacement in"] = [until_full(directory, when, 2) for when in done]
        steps = pd.read_parquet(directory / "steps")
        found["steps repeated"] = [float(len(steps) - steps.step.nunique())] * kills
    return found


def _ray_train(kills: int, folder: Path) -> dict[str, list[float]]:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    ray.init(**_RAY)
    trainer = TorchTrainer(
        recovery_loops.ray_train,
        train_loop_config={"folder": str(folder)},
        scaling_config=ScalingConfig(num_workers=recovery_loops.WORKERS),
        run_config=RunConfig(
            name="recovery",
            storage_path=str(folder / "storage"),
            failure_config=FailureConfig(max_failures=-1),
        ),
    )
    threading.Thread(target=trainer.fit, daemon=True).start()
    return _kill_by_notes(kills, Orders(str(folder)))


def _torchrun(kills: int, folder: Path) -> dict[str, list[float]]:
    words = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1"]
    words += [f"--nproc-per-node={recovery_loops.WORKERS}", "--max-restarts=100"]
    words += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    words += ["-m", recovery_loops.__name__, str(folder)]
    path = folder / "log"
    with path.open("w", encoding="utf-8") as log:
        agent = subprocess.Popen(words, stdout=log, stderr=log, env=os.environ | _OWN_STORE)
    try:
        return _kill_by_notes(kills, Orders(str(folder)))
    except RunFailedError as error:
        said = path.read_text(encoding="utf-8", errors="replace").split("\n")
        told = [line for line in said if "Error" in line]
        raise RunFailedError(
            f"{error}; torchrun said: {' / '.join(told[-2:]) or 'nothing'}"
        ) from None
    finally:
        agent.terminate()


@dataclass(frozen=True, slots=True)
class _Noted:
    """One step of one worker of a baseline."""

    pid: int
    rank: int
    step: int
    time: float


def _noted(orders: Orders) -> list[_Noted]:
    found = []
    for name, lines in orders.notes().items():
        for line in lines:
            rank, step, when = line.split(":")
            pid = int(name.removeprefix("notes-"))
            found.append(_Noted(pid, int(rank), int(step), float(when)))
    return sorted(found, key=lambda noted: noted.time)


def _kill_by_notes(kills: int, orders: Orders) -> dict[str, list[float]]:
    """Kill the second worker again and again; times are those of the first one's steps."""
    gaps, repeated = [], []
    last = 0.0
    for number in range(kills):

        def ready(since: float = last) -> bool:
            return sum(n.rank == 0 and n.time > since for n in _noted(orders)) >= _BETWEEN_STEPS

        _wait(ready, f"kill {number + 1}")
        before = _noted(orders)
        when = time.time()
        os.kill([n.pid for n in before if n.rank == 1][-1], signal.SIGKILL)
        old = {n.pid for n in before}

        def back(known: set[int] = old) -> bool:
            return any(n.rank == 0 and n.pid not in known for n in _noted(orders))

        _wait(back, f"recovery {number + 1}")
        noted = [n for n in _noted(orders) if n.rank == 0]
        first = next(n for n in noted if n.pid not in old)
        newest = [n for n in noted if n.pid in old][-1]
        gaps.append(first.time - max(newest.time, when))
        repeated.append(float(newest.step - first.step + 1))
        last = first.time
    return {"next step": gaps, "steps repeated": repeated}


SIDES: dict[str, Callable[[int, Path], dict[str, list[float]]]] = {
    "live": partial(_ours, live=True),
    "restart": partial(_ours, live=False),
    "ray-train": _ray_train,
    "torchrun": _torchrun,
}
"""What is compared: two of ours, two of others."""


def main() -> None:
    """See the module."""
    adopt_orphans()
    leave_with_parent()
    try:
        found: Any = SIDES[sys.argv[1]](int(sys.argv[2]), Path(sys.argv[3]))
    except Exception as error:
        print(f"failed {type(error).__name__}: {error}", flush=True)
    else:
        print(f"finding {json.dumps(found)}", flush=True)
    os._exit(0)  # endless runs; whoever called ends what is left


if __name__ == "__main__":
    main()
