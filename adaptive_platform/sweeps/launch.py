"""The driver of a sweep: refuse what can't fit, let Tune run the trials, write what came out."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import ray
from ray.tune import Callback
from rich.console import Console

from adaptive_platform.cluster.ray_session import ray_session
from adaptive_platform.errors import UserError
from adaptive_platform.recipe import Recipe, load_recipe
from adaptive_platform.report.wording import duration
from adaptive_platform.storage import exists, join, open_location, write_bytes
from adaptive_platform.sweeps.config import SWEEP_NAME, Sweep, read_sweep
from adaptive_platform.sweeps.page import render_page
from adaptive_platform.sweeps.progress import Progress, told
from adaptive_platform.sweeps.results import (
    BEST_NAME,
    PAGE_NAME,
    TrialRow,
    best_of,
    frame,
    row_of,
    write_table,
)
from adaptive_platform.sweeps.score import MODE, SCORE
from adaptive_platform.sweeps.searchers import DEFAULT_TRIALS, OptunaSpace
from adaptive_platform.sweeps.space import RandomChooser, draw
from adaptive_platform.sweeps.trial import STOP_NAME, SweepTrial

__all__ = ["SweepResult", "run_sweep"]

_STATE = ".tune"
_PROBED = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepResult:
    """How a sweep ended."""

    exit_code: int
    """0 done, 1 every trial failed, 130 or 143 stopped by a signal."""
    path: str
    """The sweep's directory."""
    rows: tuple[TrialRow, ...]
    """All trials, in the order in which they began."""
    best: TrialRow | None
    """The winner; None where no trial has a score."""

    def table(self, metric: str = "accuracy") -> Any:
        """All trials as a pandas DataFrame, best first."""
        return frame(self.rows, metric)


def run_sweep(
    sweep: Sweep, *, resume: str | None = None, console: Console | None = None
) -> SweepResult:
    """Run a sweep to its end, or as far as budget and signals let it.

    Args:
        sweep: What to try.
        resume: Directory of a sweep to go on with; `sweep` is then what `read_sweep` gave.
        console: Where people read; None for silence.

    Raises:
        UserError: A field of the space does not exist, a trial can't fit into the cluster, or the
            directory can't be used. Nothing was started.
    """
    sweep.searcher.check()
    planned = sweep.searcher.planned(sweep.space, sweep.budget.trials, sweep.seed)
    recipes = _checked(sweep, planned)
    path = _directory(sweep, resume)
    base = load_recipe(sweep.base()).model_copy(update={"address": sweep.address})
    with ray_session(base):
        concurrent = _fit(sweep, recipes)
        if resume is None:
            _begin(sweep, path)
        total = len(planned) if planned is not None else sweep.budget.trials or DEFAULT_TRIALS
        need = max(_workers(recipe) for recipe in recipes)
        progress = Progress(console, path, sweep.metric, total, lambda: _lack(need))
        progress.say(
            f"{sweep.name}: {total} trials, {concurrent} at a time, {need} worker(s) each; {path}"
        )
        try:
            with _asked(path, sweep.budget.seconds) as asked:
                trials = _tune(
                    sweep, planned, path, concurrent, [progress, asked], resume is not None
                )
        finally:
            progress.close()
        rows = tuple(row_of(trial, path) for trial in trials)
    result = SweepResult(
        exit_code=asked.exit_code or int(bool(rows) and all(r.status == "failed" for r in rows)),
        path=path,
        rows=rows,
        best=best_of(rows, sweep.metric),
    )
    _publish(sweep, result)
    _sum_up(sweep, result, asked, progress)
    return result


def resume_sweep(path: str) -> Sweep:
    """The sweep of a directory that was left before its end.

    Raises:
        UserError: There is none.
    """
    return read_sweep(_absolute(path))


def _checked(sweep: Sweep, planned: list[dict[str, Any]] | None) -> list[Recipe]:
    """Every recipe that will run, or for a search that learns, a sample of them.

    Raises:
        UserError: One of them is not valid; nothing was started.
    """
    if planned is None:
        chooser = RandomChooser(np.random.default_rng(sweep.seed))
        planned = [draw(sweep.space, chooser) for _ in range(_PROBED)]
    recipes = []
    for fields in planned:
        try:
            recipes.append(sweep.recipe_of(fields))
        except UserError as error:
            raise UserError(
                f"{error} (drawn: {told(fields)}. Change the space, or use `when` to keep apart "
                "what does not go together.)"
            ) from None
    scheduler = sweep.scheduler
    if scheduler.kind == "pbt" and any(
        name.startswith("batch.") and recipe.batch.kind != "fixed"
        for name in getattr(scheduler, "moves", ())
        for recipe in recipes
    ):
        raise UserError(
            "scheduler.moves: batch.global_batch is where a controller begins and does not move "
            "a running trial; use batch.kind=fixed, or move other fields."
        )
    return recipes


def _directory(sweep: Sweep, resume: str | None) -> str:
    """Where the sweep lies, or will lie.

    Raises:
        UserError: It holds another sweep already.
    """
    if resume is not None:
        return _absolute(resume)
    path = _absolute(sweep.out or f"sweeps/{sweep.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    system, root = open_location(path)
    if exists(system, join(root, SWEEP_NAME)):
        raise UserError(
            f"out = {path}: it already holds a sweep. Go on with it by resume={path}, or choose "
            "another directory."
        )
    return path


def _begin(sweep: Sweep, path: str) -> None:
    """Make the sweep's directory and write `sweep.yaml` into it.

    Raises:
        UserError: It can't be written.
    """
    # The recipe's content instead of its name: the directory alone is enough to run it again.
    content = load_recipe(sweep.recipe).model_dump(mode="json")
    stored = sweep.model_copy(update={"recipe": content, "out": None})
    system, root = open_location(path)
    try:
        system.create_dir(root, recursive=True)
        write_bytes(system, join(root, SWEEP_NAME), stored.to_yaml().encode())
    except OSError as error:
        raise UserError(
            f"out = {path}: can't be written ({error.strerror or error}). Choose a directory that "
            "you may write to."
        ) from None


def _workers(recipe: Recipe) -> int:
    return max(recipe.workers) if isinstance(recipe.workers, tuple) else recipe.workers or 1


def _slots() -> int:
    """Workers that the nodes of the cluster have room for, one CPU (and one GPU) each."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    with_gpu = any(node.get("GPU", 0) >= 1 for node in nodes)
    kinds = ("CPU", "GPU") if with_gpu else ("CPU",)
    return sum(int(min(node.get(kind, 0) for kind in kinds)) for node in nodes)


def _fit(sweep: Sweep, recipes: list[Recipe]) -> int:
    """Trials that run at a time: each gets all it needs, or none of it.

    Raises:
        UserError: One trial alone is too large.
    """
    slots = _slots()
    need = max(_workers(recipe) for recipe in recipes)
    if need > slots:
        have = ray.cluster_resources()
        amounts = ", ".join(f"{have.get(kind, 0):g} {kind}" for kind in ("CPU", "GPU"))
        raise UserError(
            f"workers = {need}: a trial needs {need} CPU (and as many GPUs where there are some), "
            f"the cluster has {amounts}, room for {slots} worker(s). Ask for fewer workers or add "
            "nodes."
        )
    return min(slots // need, sweep.budget.concurrent or slots)


def _lack(need: int) -> str:
    free = ray.available_resources()
    kinds = ("CPU", "GPU") if ray.cluster_resources().get("GPU", 0) >= 1 else ("CPU",)
    short = [kind for kind in kinds if free.get(kind, 0) < need]
    return ", ".join(f"{need} {kind} asked, {free.get(kind, 0):g} free" for kind in short)


@dataclass(slots=True)
class _Asked(Callback):
    """What was asked for, and the part of Tune's loop that insists on it."""

    exit_code: int = 0
    out_of_time: bool = False

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        """Tune is still going: a signal that came before it listened is sent again."""
        if (self.exit_code or self.out_of_time) and _on_main_thread():
            signal.raise_signal(signal.SIGUSR1)


@contextmanager
def _asked(path: str, seconds: float | None) -> Iterator[_Asked]:
    """Signals and the end of the time budget: trials save and leave, then Tune ends.

    Tune stops on SIGUSR1; its own SIGINT handler would end trials without asking them. A second
    signal leaves at once. Elsewhere than on the main thread there are no signals, and Tune is given
    the time budget as well.
    """
    asked = _Asked()
    system, root = open_location(path)
    main = _on_main_thread()
    over = threading.Event()

    def stop() -> None:
        with suppress(OSError):
            write_bytes(system, join(root, STOP_NAME), b"")
        if main:
            os.kill(os.getpid(), signal.SIGUSR1)

    def on_signal(number: int, frame: FrameType | None) -> None:
        if asked.exit_code:
            raise KeyboardInterrupt
        asked.exit_code = 128 + number
        stop()

    def on_time() -> None:
        if seconds is not None and not over.wait(seconds):
            asked.out_of_time = True
            stop()

    numbers = (signal.SIGINT, signal.SIGTERM) if main else ()
    before = {number: signal.getsignal(number) for number in (*numbers, signal.SIGUSR1)}
    if main:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until Tune takes it over
    for number in numbers:
        signal.signal(number, on_signal)
    timer = threading.Thread(target=on_time, name="sweep-budget", daemon=True)
    timer.start()

    def forget() -> None:
        with suppress(OSError):
            if exists(system, join(root, STOP_NAME)):
                system.delete_file(join(root, STOP_NAME))

    forget()  # what an attempt left that was killed
    try:
        yield asked
    finally:
        over.set()
        if main:
            for number, handler in before.items():
                signal.signal(number, handler)
        forget()


def _tune(
    sweep: Sweep,
    planned: list[dict[str, Any]] | None,
    path: str,
    concurrent: int,
    callbacks: list[Callback],
    resuming: bool,
) -> list[Any]:
    """Hand the trials to Tune; returns Tune's trials."""
    os.environ |= {
        "RAY_AIR_NEW_OUTPUT": "0",
        "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
        "TUNE_DISABLE_SIGINT_HANDLER": "1",
        "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    }
    from ray import tune
    from ray.tune.search import BasicVariantGenerator

    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
    config: dict[str, Any] = {"dir": path}
    if planned is not None:
        config["fields"] = tune.grid_search(planned)
        search: Any = BasicVariantGenerator(max_concurrent=concurrent)
    else:
        import optuna
        from ray.tune.search import ConcurrencyLimiter
        from ray.tune.search.optuna import OptunaSearch

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        space = OptunaSpace(sweep.space)
        found = OptunaSearch(space=space, metric=SCORE, mode=MODE, seed=sweep.seed)
        search = ConcurrencyLimiter(found, max_concurrent=concurrent)
    analysis = tune.run(
        SweepTrial,
        name=_STATE,
        storage_path=path,
        config=config,
        num_samples=1 if planned is not None else sweep.budget.trials or DEFAULT_TRIALS,
        # The workers take the CPUs; the trial itself only watches, next to Ray's head.
        resources_per_trial=tune.PlacementGroupFactory([{"node:__internal_head__": 0.001}]),
        search_alg=search,
        scheduler=sweep.scheduler.build(SCORE, MODE, sweep.space, sweep.seed),
        callbacks=callbacks,
        reuse_actors=True,
        raise_on_failed_trial=False,
        verbose=0,
        time_budget_s=None if _on_main_thread() else sweep.budget.seconds,
        resume="AUTO+ERRORED" if resuming else None,
    )
    trials: list[Any] = analysis.trials
    return trials


def _on_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _publish(sweep: Sweep, result: SweepResult) -> None:
    """Write `results.parquet`, `best.yaml` and `sweep.html`."""
    write_table(result.table(sweep.metric), result.path)
    system, root = open_location(result.path)
    best = ""
    if result.best is not None:
        recipe = sweep.recipe_of(result.best.fields)
        recipe = recipe.model_copy(
            update={
                "name": f"{sweep.name}-best",
                "report": recipe.report.model_copy(update={"html": True}),
            }
        )
        best = recipe.to_yaml()
        write_bytes(system, join(root, BEST_NAME), best.encode())
    write_bytes(system, join(root, PAGE_NAME), render_page(sweep, result.rows, best).encode())


def _sum_up(sweep: Sweep, result: SweepResult, asked: _Asked, progress: Progress) -> None:
    failed = [row for row in result.rows if row.status == "failed"]
    progress.say(f"{len(result.rows)} trial(s) in {duration(progress.seconds)}")
    if asked.out_of_time and sweep.budget.seconds is not None:
        progress.say(f"the budget of {duration(sweep.budget.seconds)} is spent")
    if failed:
        progress.say(f"{len(failed)} of {len(result.rows)} trials failed")
    if result.best is not None:
        best = result.best
        score = f"{100 * best.accuracy:.1f} %" if best.accuracy is not None else "–"
        loss = "" if best.loss is None else f", loss {best.loss:.4g}"
        progress.say(f"best: trial {best.trial}, accuracy {score}{loss}, {told(best.fields)}")
        progress.say(f"  recipe   {join(result.path, BEST_NAME)}")
    progress.say(f"  page     {join(result.path, PAGE_NAME)}")
    progress.say(f"  table    {join(result.path, 'results.parquet')}")
    if asked.exit_code or asked.out_of_time:
        progress.say(f"  go on    adaptive-platform sweep resume={result.path}")


def _absolute(path: str) -> str:
    return path if "://" in path else str(Path(path).expanduser().absolute())
