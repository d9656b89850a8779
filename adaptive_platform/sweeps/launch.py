"""The driver of a sweep: refuse what can't fit, let Tune run the trials, write what came out."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray.tune import Callback
from rich.console import Console

from adaptive_platform.cluster.ray_session import ray_session
from adaptive_platform.errors import UserError
from adaptive_platform.recipe import load_recipe
from adaptive_platform.report.wording import duration
from adaptive_platform.storage import exists, join, open_location, write_bytes
from adaptive_platform.sweeps.asked import Asked, asked_to_end, on_main_thread
from adaptive_platform.sweeps.config import SWEEP_NAME, Sweep, read_sweep
from adaptive_platform.sweeps.fitting import checked_recipes, fit, lack, workers_of
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
from adaptive_platform.sweeps.trial import SweepTrial

__all__ = ["SweepResult", "run_sweep"]

_STATE = ".tune"


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
    recipes = checked_recipes(sweep, planned)
    path = _directory(sweep, resume)
    base = load_recipe(sweep.base()).model_copy(update={"address": sweep.address})
    with ray_session(base):
        concurrent = fit(sweep, recipes)
        if resume is None:
            _begin(sweep, path)
        total = len(planned) if planned is not None else sweep.budget.trials or DEFAULT_TRIALS
        need = max(workers_of(recipe) for recipe in recipes)
        progress = Progress(console, path, sweep.metric, total, lambda: lack(need))
        progress.say(
            f"{sweep.name}: {total} trials, {concurrent} at a time, {need} worker(s) each; {path}"
        )
        try:
            with asked_to_end(path, sweep.budget.seconds) as asked:
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
        time_budget_s=None if on_main_thread() else sweep.budget.seconds,
        resume="AUTO+ERRORED" if resuming else None,
    )
    trials: list[Any] = analysis.trials
    return trials


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


def _sum_up(sweep: Sweep, result: SweepResult, asked: Asked, progress: Progress) -> None:
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
