"""Plays one scenario after the other as it is told on its input, and prints what came of each.

    python -m adaptive_platform.bench.playing < names

A process of its own, so that whoever wants the results can end it with all that it started.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from adaptive_platform.bench.faults import Network, Orders, PacedLoss, Points
from adaptive_platform.bench.hosts import Hosts
from adaptive_platform.bench.invariants import recipe
from adaptive_platform.bench.judging import Finding, judge
from adaptive_platform.bench.scenarios import Scenario, random_trouble, scenario_of
from adaptive_platform.bench.stage import Stage, adopt_orphans, leave_with_parent, workers
from adaptive_platform.bench.trouble import Moment
from adaptive_platform.cluster.launch import launch
from adaptive_platform.cluster.mailbox import Message
from adaptive_platform.errors import RunFailedError, UserError

__all__ = ["NotHereError", "play"]

_JUDGE_SECONDS = 20.0
"""Of a scenario's time, for its end and for looking at what came of it."""
_END_SECONDS = 10.0
_CALM_STEPS = 45
"""Steps after the last trouble: more than two checkpoints."""
_LOOK_SECONDS = 0.02
_DISK_MIB = 16
_NODES = 2
_BREATH_SECONDS = (2.0, 8.0)
"""Between the events of a soak, once all workers are back."""
_BACK_SECONDS = 90.0
"""Longest wait for that."""


class NotHereError(RuntimeError):
    """This machine does not allow what a scenario needs."""


@dataclass(slots=True)
class _Watch:
    """Collects what the workers say, and answers whether the run may stop."""

    stage: Stage
    stop: bool = False
    step: int = 0
    repeated: int = 0
    """Steps that were heard of before a restart and came again."""
    restarts: int = 0
    heard: list[str] = field(default_factory=list)
    """Kinds of events."""

    def __call__(self, messages: list[Message]) -> bool:
        for kind, fields, _ in messages:
            if kind == "step":
                step = fields["step"] - fields["skipped"]
                self.step = max(self.step, step)
            elif kind == "event":
                self.heard.append(fields["kind"])
                if fields["kind"] == "resume" and fields["text"].startswith("resumed at step"):
                    self.restarts += 1
                    self.repeated += max(self.step - fields["step"], 0)
            elif kind == "members":
                self.stage.pids, self.stage.machines = fields["pids"], fields["nodes"]
        return self.stop


class _Run:
    """The run that trouble is made for, on a thread of its own."""

    def __init__(self, stage: Stage, scenario: Scenario, run_dir: Path, orders: Path) -> None:
        self.watch = _Watch(stage)
        self._deadline = time.monotonic() + scenario.limit_seconds - _JUDGE_SECONDS
        self._stage = stage
        self._scenario = scenario
        self._run_dir = run_dir
        self._orders = str(orders)
        self._results: list[Any] = []
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        live = str(self._scenario.live).lower()
        config = recipe(str(self._run_dir), self._scenario.workers, f"membership.live={live}")
        try:
            result = launch(
                config,
                watch=self.watch,
                model=partial(Network, self._orders),
                train_data=Points(self._orders),
                loss=PacedLoss(self._orders),
            )
            self._results.append(result)
        except BaseException as error:
            self._results.append(error)

    def until(self, condition: Callable[[], bool], what: str, seconds: float = math.inf) -> None:
        """Wait for something, as long as the scenario's time allows, or less.

        Raises:
            RunFailedError: It does not happen, or the run ends.
        """
        began = time.monotonic()
        deadline = min(began + seconds, self._deadline)
        while not condition():
            if self._results:
                raise RunFailedError(f"the run ended early: {self._results[0]}")
            if time.monotonic() > deadline:
                raise RunFailedError(
                    f"{what} did not happen in {time.monotonic() - began:.0f} s (step "
                    f"{self.watch.step}, {len(self._stage.pids)} members, "
                    f"{len(workers())} processes)"
                )
            time.sleep(_LOOK_SECONDS)

    def end(self) -> None:
        """Ask it to stop, and wait.

        Raises:
            RunFailedError: It does not end, or fails.
        """
        self.watch.stop = True
        self._thread.join(max(self._deadline - time.monotonic(), _END_SECONDS))
        if not self._results:
            raise RunFailedError("the run was asked to stop and does not end")
        found = self._results[0]
        if isinstance(found, BaseException) or found.status != "interrupted":
            raise RunFailedError(f"the run failed: {found}")


def play(stage: Stage, scenario: Scenario) -> Finding:
    """Run one scenario and check its invariants.

    Raises:
        RunFailedError: The run failed, hangs, or something did not happen to it.
        NotHereError: It needs what this machine does not allow.
    """
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    (folder / "orders").mkdir()
    (folder / "runs").mkdir()
    orders = Orders(str(folder / "orders"))
    try:
        with _disk(folder / "runs", small=scenario.small_disk) as disk:
            stage.begin(orders, disk)
            run_dir = folder / "runs" / "run"
            run = _Run(stage, scenario, run_dir, folder / "orders")
            if scenario.soak_seconds is None:
                done = _act(stage, scenario, run)
            else:
                done = _soak(stage, scenario, run)
            run.end()
            return judge(
                scenario,
                run_dir,
                orders.notes(),
                done=done,
                repeated=run.watch.repeated,
                restarts=run.watch.restarts,
                began=began,
            )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _act(stage: Stage, scenario: Scenario, run: _Run) -> list[float]:
    watch = run.watch
    from_step = heard = 0
    for moment in scenario.moments:
        run.until(
            partial(_ripe, stage, watch, moment, from_step, heard),
            f"the moment for {type(moment.trouble).__name__}",
        )
        moment.done.append(time.time())
        heard = len(watch.heard)
        moment.trouble.act(stage)
        from_step = watch.step
        if moment.then:
            told = partial(_told, watch, moment.then, heard)
            run.until(told, f"`{moment.then}`")
            stage.pids = ()  # those that are known from before
    if scenario.workers_after is not None:
        want = scenario.workers_after
        run.until(lambda: len(stage.pids) == want, f"{want} workers")
    if scenario.tells:
        told = partial(_told, watch, scenario.tells, heard)
        run.until(told, f"`{scenario.tells}`")
    last = watch.step + _CALM_STEPS
    run.until(lambda: watch.step >= last, f"{_CALM_STEPS} calm steps")
    return [moment.done[-1] for moment in scenario.moments]


def _told(watch: _Watch, kind: str, since: int) -> bool:
    return kind in watch.heard[since:]


def _ripe(stage: Stage, watch: _Watch, moment: Moment, from_step: int, heard: int) -> bool:
    if watch.step < from_step + moment.steps:
        return False
    if moment.workers is not None and len(stage.pids) != moment.workers:
        return False
    if moment.heard and not _told(watch, moment.heard, heard):
        return False
    return not moment.coming or 0 < len(stage.pids) < len(workers())


def _soak(stage: Stage, scenario: Scenario, run: _Run) -> list[float]:
    """One event after the other, as soon as all workers are back."""
    assert scenario.soak_seconds is not None
    draw = random.Random(scenario.seed)
    most = scenario.workers[1]
    run.until(lambda: run.watch.step >= 20, "the start of the run")
    end = time.monotonic() + scenario.soak_seconds
    done = []
    while time.monotonic() < end:
        run.until(lambda: len(stage.pids) == most, "all workers back", _BACK_SECONDS)
        stage.clear_drained()
        for trouble in random_trouble(draw):
            done.append(time.time())
            print(f"{type(trouble).__name__} {asdict(trouble)}", file=sys.stderr, flush=True)  # type: ignore[call-overload]
            trouble.act(stage)
        time.sleep(draw.uniform(*_BREATH_SECONDS))
    run.until(lambda: len(stage.pids) == most, "all workers back", _BACK_SECONDS)
    last = run.watch.step + _CALM_STEPS
    run.until(lambda: run.watch.step >= last, f"{_CALM_STEPS} calm steps")
    return done


@contextmanager
def _disk(folder: Path, *, small: bool) -> Iterator[Path | None]:
    """A small file system at a folder, where it is wanted.

    Raises:
        NotHereError: Mounting is not allowed.
    """
    if not small:
        yield None
        return
    words = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_MIB}m", "tmpfs", str(folder)]
    try:
        subprocess.run(words, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        raise NotHereError("a small file system can be mounted by root only") from None
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


def main() -> None:
    """Names from standard input, one JSON object per name to standard output."""
    torch.set_num_threads(1)
    adopt_orphans()
    leave_with_parent()
    stages: dict[bool, Stage] = {}
    for line in sys.stdin:
        scenario = scenario_of(line.strip())
        began = time.monotonic()
        base = {"name": scenario.name, "event": scenario.event, "expected": scenario.expected}
        try:
            finding = asdict(play(_stage(stages, hosts=scenario.hosts), scenario))
        except NotHereError as error:
            finding = base | {"verdict": f"not run: {error}"}
        except Exception as error:
            seconds = round(time.monotonic() - began, 1)
            finding = base | {"verdict": f"failed: {error}", "seconds": seconds, "broken": True}
        print(f"finding {json.dumps(finding)}", flush=True)


def _stage(stages: dict[bool, Stage], *, hosts: bool) -> Stage:
    """One stage at a time, as a process can use one Ray."""
    if hosts not in stages:
        for other in stages.values():
            other.close()
        stages.clear()
        stages[hosts] = _new_stage(hosts=hosts)
    return stages[hosts]


def _new_stage(*, hosts: bool) -> Stage:
    if not hosts:
        return Stage(_NODES)
    try:
        return Hosts(_NODES)
    except UserError as error:
        raise NotHereError(str(error)) from None


if __name__ == "__main__":
    main()
