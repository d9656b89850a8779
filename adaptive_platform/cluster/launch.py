"""The driver's side of a run: start or join Ray, start the workers, show, stop, and sum up."""

from __future__ import annotations

import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from types import FrameType
from typing import Any

import ray
from rich.console import Console

from adaptive_platform.cluster.directory import RunDirectory
from adaptive_platform.cluster.mailbox import Message, open_mailbox
from adaptive_platform.cluster.monitor import Monitor
from adaptive_platform.cluster.ray_session import (
    is_local,
    ray_session,
    resources_for,
    workers_wanted,
)
from adaptive_platform.cluster.recruits import Recruiter
from adaptive_platform.cluster.worker import Job
from adaptive_platform.errors import UserError
from adaptive_platform.recipe import Recipe
from adaptive_platform.report.environment import describe_environment, write_environment
from adaptive_platform.report.records import RunResult
from adaptive_platform.report.result import write_result
from adaptive_platform.report.trackers import Trackers, check_trackers
from adaptive_platform.report.wording import summary_lines

__all__ = ["launch"]

_POLL_SECONDS = 0.2
_ANSWER_SECONDS = 10.0


def launch(
    recipe: Recipe,
    *,
    console: Console | None = None,
    command_time: float | None = None,
    watch: Callable[[list[Message]], bool] | None = None,
    sweep: str = "",
    **brought: Any,
) -> RunResult:
    """Run a recipe on Ray to its end.

    Args:
        recipe: What to run, where to, on how many workers.
        console: Where people read; None for silence.
        command_time: When the user's command began, in seconds since 1970, for the start-up
            account; now where None.
        watch: Sees the messages of the workers a few times a second, and as `members` their
            processes and nodes by rank where membership is live; the workers save and leave
            once it has returned True.
        sweep: Name of the sweep that the run is a trial of, for its metrics.
        **brought: The user's own `model`, `train_data`, `eval_data`, `classes`, `loss`, as in
            `worker.Job`.

    Returns:
        How it ended. A failed run is returned, not raised.

    Raises:
        UserError: The input can't work; nothing is left behind.
    """
    length = str(recipe.stop.horizon)
    if recipe.lr_rule.clock == "scale_invariant":
        length += " of the base batch"
    monitor = Monitor(console, command_time or time.time(), length)
    monitor.mark("imported", time.time())
    _check_early(recipe, brought)
    with RunDirectory.taken(recipe) as directory, ray_session(directory.recipe) as session:
        recipe = directory.recipe
        monitor.mark("ray", time.time())
        scaling = resources_for(recipe, session)
        _, high = workers_wanted(recipe, session.resources)
        write_environment(directory.path, describe_environment(session.resources))
        run = recipe.name if sweep else directory.path.rstrip("/").rsplit("/", 1)[-1]
        mailbox = open_mailbox(
            {"run": run, "recipe": recipe.name, "sweep": sweep},
            max_workers=high,
            max_losses=recipe.max_failures,
        )
        job = Job(
            recipe=recipe,
            run_dir=directory.path,
            mailbox=mailbox,
            must_resume=recipe.resume is not None,
            **brought,
        )
        try:
            with _signals() as asked:
                error = _run_trainer(job, scaling, monitor, asked, watch)
        finally:
            if monitor.any_step:
                directory.keep()
        result = monitor.result(error, asked.exit_code)
        if result.exit_code != 2 or monitor.any_step:
            directory.keep()
            result = _publish(directory.path, recipe, result, session.logs, monitor)
    monitor.close()
    if console is not None and (result.exit_code != 2 or monitor.any_step):
        for line in summary_lines(asdict(result), directory.path):
            monitor.write(console, line)
    return result


def _check_early(recipe: Recipe, brought: dict[str, Any]) -> None:
    """Refuse before Ray starts what can be refused here.

    Data is looked at only where this machine is the cluster; elsewhere its paths are the workers'.
    """
    check_trackers(recipe.report.trackers, recipe.resume or recipe.out or "")
    if brought.get("model") is None:
        recipe.model.check()
    if brought.get("train_data") is None and is_local(recipe) and not ray.is_initialized():
        recipe.data.open()


def _run_trainer(
    job: Job,
    scaling: Any,
    monitor: Monitor,
    asked: _Asked,
    watch: Callable[[list[Message]], bool] | None,
) -> BaseException | None:
    """Fit on a thread of its own, so that this one can show progress and take signals."""
    from ray import cloudpickle
    from ray.train import FailureConfig, RunConfig

    from adaptive_platform.cluster.backend import AdaptiveBackendConfig, LeanTrainer
    from adaptive_platform.cluster.entry import run_job

    packed = cloudpickle.dumps(job)
    separator = "" if job.run_dir.endswith("/") else "/"
    trainer = LeanTrainer(
        run_job,
        # As bytes: Ray's controller unpickles this too, and would import torch for it.
        train_loop_config={"job": packed},
        backend_config=AdaptiveBackendConfig(),
        scaling_config=scaling,
        run_config=RunConfig(
            # A name that was used before would silently resume that run's controller.
            name=f"{job.recipe.name}-{uuid.uuid4().hex[:8]}",
            storage_path=f"{job.run_dir}{separator}.ray",
            failure_config=FailureConfig(max_failures=job.recipe.max_failures),
        ),
    )
    recruiter = None
    if job.recipe.is_live:
        trainer.mailbox = job.mailbox
        resources = scaling.resources_per_worker
        recruiter = Recruiter(job.mailbox, packed, resources, monitor.say)
    trackers = Trackers(job.recipe.report.trackers, job.run_dir, job.recipe.model_dump(mode="json"))
    failure: list[BaseException] = []

    def fit() -> None:
        try:
            trainer.fit()
        except BaseException as error:  # handed to the thread that waits
            failure.append(error)

    thread = threading.Thread(target=fit, name="ray-train-fit", daemon=True)
    thread.start()
    passed_on = False

    def take() -> None:
        messages = _collect(job.mailbox)
        monitor.take(messages)
        for told in trackers.take(messages):
            monitor.say(told)
        if watch is not None and watch(messages) and not asked.exit_code:
            asked.exit_code = 128 + signal.SIGTERM

    while thread.is_alive():
        thread.join(_POLL_SECONDS)
        take()
        if recruiter is not None and not asked.exit_code:
            status = recruiter.look()
            if status is not None and watch is not None:
                members = {"pids": status.pids, "nodes": status.nodes}
                watch([("members", members, 0.0)])
        if asked.exit_code and not passed_on:
            passed_on = True
            job.mailbox.ask_to_stop.remote()
            monitor.say(
                "stopping: the workers finish the step in hand and save; Ctrl-C again leaves now"
            )
    if recruiter is not None:
        recruiter.close()
    take()
    trackers.close()
    return failure[0] if failure else None


def _collect(mailbox: Any) -> list[Message]:
    """What is in the mailbox; nothing when it, or all of Ray, is gone: the fit then says why."""
    try:
        messages: list[Message] = ray.get(mailbox.collect.remote(), timeout=_ANSWER_SECONDS)
    except (ray.exceptions.RayError, ConnectionError):
        return []
    return messages


@dataclass(slots=True)
class _Asked:
    """What signals asked for; 0 while there was none."""

    exit_code: int = 0


@contextmanager
def _signals() -> Iterator[_Asked]:
    """SIGINT and SIGTERM ask the workers to save and leave; a second SIGINT leaves at once.

    Elsewhere than on the main thread, where Python allows no handlers, signals stay as they are.
    """
    asked = _Asked()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def on_signal(number: int, frame: FrameType | None) -> None:
        if asked.exit_code and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked.exit_code = 128 + number

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, on_signal)
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _publish(
    run_dir: str, recipe: Recipe, result: RunResult, logs: str, monitor: Monitor
) -> RunResult:
    """Write `report.html` and `result.json`, and say in the result where everything lies."""
    outputs = {"checkpoints": f"{run_dir}/checkpoints"}
    if logs:
        outputs["Ray's logs"] = logs
    if recipe.report.html:
        outputs["report"] = f"{run_dir}/report.html"
    result = replace(result, outputs=outputs)
    try:
        write_result(run_dir, result)
        if recipe.report.html:
            from adaptive_platform.report.html import write_html
            from adaptive_platform.report.run_data import read_run

            write_html([read_run(run_dir)], outputs["report"])
    except (OSError, UserError) as error:
        # The run itself is over; what is missing can be made again from its records.
        monitor.say(f"report or result not written: {error}")
    return result
