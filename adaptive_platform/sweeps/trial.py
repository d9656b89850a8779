"""One trial as Tune sees it: a Ray Train run in its own directory, on a thread beside Tune's calls.

Tune's own bridge (`ray.tune.integration.ray_train`) hands on what workers give to
`ray.train.report`, a barrier that our loop has no use for; the run's mailbox brings the scores
here instead, and takes back the wish to stop.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ray.tune import Trainable

from adaptive_platform.storage import exists, join, open_location
from adaptive_platform.sweeps.score import SCORE, lost, score_of

if TYPE_CHECKING:
    from adaptive_platform.recipe import Recipe
    from adaptive_platform.sweeps.config import Sweep

__all__ = ["STOP_NAME", "SweepTrial", "run_dir_of"]

STOP_NAME = "_stop"
"""File in the sweep's directory while all trials are asked to save and leave."""

_POLL_SECONDS = 0.5
_LEAVE_SECONDS = 60.0
_SAVE_SECONDS = 15.0


def run_dir_of(sweep_dir: str, trial_id: str) -> str:
    """Run directory of a trial."""
    return join(join(sweep_dir, "trials"), trial_id.rsplit("_", 1)[-1])


class TrialFailedError(RuntimeError):
    """The run of a trial failed; the message is the run's own."""


class SweepTrial(Trainable):
    """Its config holds `dir`, the sweep's directory, and `fields`, the recipe fields drawn for it.

    A trial whose directory holds a checkpoint goes on from there: after a crash of the sweep, or
    when it took over another trial's weights.
    """

    def setup(self, config: dict[str, Any]) -> None:
        """Called by Tune when the trial's process begins."""
        # Ray Train reads these where the run is started, which is here.
        os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")
        os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
        self._run: _Run | None = None

    def step(self) -> dict[str, Any]:
        """Wait for the next evaluation, or the end.

        Raises:
            TrialFailedError: The run failed, or was stopped by something else than the sweep.
        """
        if self._run is None:
            self._run = _Run(self.config["dir"], self.config["fields"], self.trial_id)
        return self._run.next_report()

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Make room for another trial, or for this one with other fields."""
        self.cleanup()
        self.config = new_config
        return True

    def cleanup(self) -> None:
        """Let the workers save and leave."""
        if self._run is not None:
            self._run.leave()
            self._run = None

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Copy the run's newest checkpoint, for a trial that takes over from this one."""
        if self._run is not None:
            self._run.copy_newest(checkpoint_dir)

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        """Begin from another trial's checkpoint."""
        from pyarrow.fs import FileSelector, LocalFileSystem, copy_files

        here = LocalFileSystem()
        if not here.get_file_info(FileSelector(checkpoint_dir, allow_not_found=True)):
            return  # It was stopped before its first checkpoint; so this one starts anew.
        self.cleanup()
        system, root = open_location(run_dir_of(self.config["dir"], self.trial_id))
        target = join(root, "checkpoints")
        if exists(system, target):
            system.delete_dir(target)
        system.create_dir(target, recursive=True)
        copy_files(checkpoint_dir, target, source_filesystem=here, destination_filesystem=system)


class _Run:
    """A run under way, seen from the trial."""

    def __init__(self, sweep_dir: str, fields: dict[str, Any], trial_id: str) -> None:
        self._sweep_dir = sweep_dir
        self._dir = run_dir_of(sweep_dir, trial_id)
        self._reports: queue.SimpleQueue[dict[str, Any] | Exception] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._newest: dict[str, Any] = {}
        self._batch: int | None = None
        self._metric = "accuracy"
        self._scores: dict[str, Any] = {}
        self._begun = time.monotonic()
        self._thread = threading.Thread(target=self._work, args=(fields,), daemon=True)
        self._thread.start()

    def next_report(self) -> dict[str, Any]:
        """What Tune hears next."""
        while True:
            try:
                report = self._reports.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                if self._asked_to_leave():
                    self._stop.set()
                if not self._thread.is_alive() and self._reports.empty():
                    raise TrialFailedError("its run was stopped") from None
                continue
            if isinstance(report, Exception):
                raise report
            return report

    def leave(self) -> None:
        """Ask the workers to save and leave, and wait for them."""
        self._stop.set()
        self._thread.join(_LEAVE_SECONDS)

    def copy_newest(self, target: str) -> None:
        """Copy the newest checkpoint; one of the last evaluation's step may still be on its way."""
        from pyarrow.fs import LocalFileSystem, copy_files

        from adaptive_platform.checkpoints.store import CheckpointStore

        store = CheckpointStore(self._dir)
        deadline = time.monotonic() + _SAVE_SECONDS
        saved = store.saved()
        while not saved or max(saved).step < self._scores.get("step", 0):
            if time.monotonic() > deadline or not self._thread.is_alive():
                break
            time.sleep(0.1)
            saved = store.saved()
        if not saved:
            return
        system, _ = open_location(self._dir)
        path = max(saved).path
        folder = os.path.join(target, path.rstrip("/").rsplit("/", 1)[-1])
        os.makedirs(folder)
        copy_files(
            path,
            folder,
            source_filesystem=system,
            destination_filesystem=LocalFileSystem(),
        )

    def _asked_to_leave(self) -> bool:
        with suppress(OSError):
            system, root = open_location(self._sweep_dir)
            return exists(system, join(root, STOP_NAME))
        return False

    def _work(self, fields: dict[str, Any]) -> None:
        from adaptive_platform.cluster.launch import launch
        from adaptive_platform.sweeps.config import read_sweep

        try:
            sweep = read_sweep(self._sweep_dir)
            self._metric = sweep.metric
            result = launch(self._recipe(sweep, fields), watch=self._watch, sweep=sweep.name)
        except Exception as error:
            self._reports.put(TrialFailedError(str(error)))
            return
        scores = _given({"accuracy": result.accuracy, "loss": result.loss})
        if result.status == "done" and lost(scores):
            self._reports.put(TrialFailedError(_diverged(scores)))
        elif result.status == "done":
            self._batch = result.final_batch or self._batch
            self._report(scores, 100.0, ended="done", done=True)
        elif self._stop.is_set() and result.status == "interrupted":
            self._report({**self._scores, **scores}, self._newest.get("percent", 0.0))
        else:
            self._reports.put(TrialFailedError(result.message))

    def _recipe(self, sweep: Sweep, fields: dict[str, Any]) -> Recipe:
        name = f"{sweep.name}-{self._dir.rsplit('/', 1)[-1]}"
        where = {"resume": self._dir} if _can_go_on(self._dir) else {"out": self._dir}
        return sweep.recipe_of(fields).model_copy(update={"name": name, **where})

    def _watch(self, messages: list[tuple[str, dict[str, Any], float]]) -> bool:
        for kind, fields, fraction in messages:
            if kind == "step":
                self._newest = fields
            elif kind == "batch":
                self._batch = fields["now"]
            elif kind == "decision":
                self._batch = fields["new_batch"]
            elif kind == "evaluation":
                self._report(_given(fields) | {"step": fields["step"]}, 100.0 * fraction)
        return self._stop.is_set()

    def _report(self, scores: dict[str, Any], percent: float, **more: Any) -> None:
        self._scores = scores
        step = self._newest
        self._reports.put(
            {
                "step": step.get("step", 0),
                "samples": step.get("samples_seen", 0),
                "batch": self._batch,
                "lr": step.get("lr"),
                "seconds": time.monotonic() - self._begun,
                "percent": percent,
                **scores,
                **more,
                SCORE: score_of(self._metric, _given(scores)),
            }
        )


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The scores of an evaluation that were measured."""
    return {name: fields[name] for name in ("accuracy", "loss") if fields.get(name) is not None}


def _diverged(scores: Mapping[str, Any]) -> str:
    return (
        f"it ended with a {lost(scores)}, which is no score. Its records show where it left the "
        "others; a lower learning rate or a longer warm-up usually helps."
    )


def _can_go_on(run_dir: str) -> bool:
    """True where the run directory holds a checkpoint. One without is cleared: it starts anew."""
    from adaptive_platform.checkpoints.store import CheckpointStore
    from adaptive_platform.cluster.directory import discard
    from adaptive_platform.report.run_data import RECIPE_NAME

    system, root = open_location(run_dir)
    if not exists(system, join(root, RECIPE_NAME)):
        return False
    if CheckpointStore(run_dir).saved():
        return True
    discard(run_dir)
    return False
