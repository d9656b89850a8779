"""The run's scalars for TensorBoard, MLflow or Weights & Biases, through their own libraries."""

from __future__ import annotations

import importlib
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

from adaptive_platform.errors import UserError
from adaptive_platform.report.metrics import step_gauges

__all__ = ["Tracker", "TrackerKind", "Trackers", "check_trackers"]

TrackerKind = Literal["tensorboard", "mlflow", "wandb"]

_PACKAGES: dict[str, tuple[str, ...]] = {
    "tensorboard": ("tensorboard", "tensorboardX"),  # the second comes with ray[tune]
    "mlflow": ("mlflow",),
    "wandb": ("wandb",),
}


class Tracker(ABC):
    """One place that scalars go to."""

    @abstractmethod
    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Scalars by name, at a step."""

    @abstractmethod
    def close(self) -> None:
        """Nothing more comes."""


def check_trackers(kinds: Sequence[TrackerKind], run_dir: str) -> None:
    """Refuse early what can't work.

    Raises:
        UserError: A library is missing, or can't write where the run lies.
    """
    for kind in kinds:
        packages = _PACKAGES[kind]
        if not any(importlib.util.find_spec(package) for package in packages):
            raise UserError(
                f"report.trackers = {kind}: {packages[0]} is not installed. Install it, or leave "
                f"{kind} away."
            )
        if kind == "tensorboard" and "://" in run_dir:
            raise UserError(
                f"report.trackers = tensorboard: event files need a local path, not {run_dir}. "
                "Choose another `out`, or another tracker."
            )


class Trackers:
    """All trackers of a run, fed by its driver with what reaches it: a few steps a second.

    A tracker that fails is dropped with one message; the run goes on.

    Args:
        kinds: Which.
        run_dir: TensorBoard's files go to `tensorboard/` below it.
        recipe: The resolved recipe, for trackers that keep parameters.
    """

    def __init__(
        self, kinds: Sequence[TrackerKind], run_dir: str, recipe: Mapping[str, Any]
    ) -> None:
        name = run_dir.rstrip("/").rsplit("/", 1)[-1]
        makers: dict[str, Any] = {"tensorboard": _TensorBoard, "mlflow": _MLflow, "wandb": _Wandb}
        self._trackers: dict[str, Tracker] = {}
        self._failed: list[str] = []
        for kind in kinds:
            try:
                self._trackers[kind] = makers[kind](run_dir, name, recipe)
            except Exception as error:  # such as no login, or no network
                self._failed.append(f"{kind} is left out: {error}")

    def take(self, messages: Sequence[tuple[str, Mapping[str, Any], float]]) -> list[str]:
        """Log the steps and evaluations among messages; returns what went wrong, for people."""
        told, self._failed = self._failed, []
        for kind, fields, _ in messages:
            if kind == "step":
                told += self._log(step_gauges(fields), fields["step"])
            elif kind == "evaluation":
                scores = {f"eval_{n}": fields.get(n) for n in ("loss", "accuracy")}
                known = {n: float(v) for n, v in scores.items() if v is not None}
                told += self._log(known, fields["step"])
        return told

    def _log(self, scalars: Mapping[str, float], step: int) -> list[str]:
        told = []
        for kind, tracker in list(self._trackers.items()):
            try:
                tracker.log(scalars, step)
            except Exception as error:  # somebody else's service must not end the run
                del self._trackers[kind]
                told.append(f"{kind} is left out from now on: {error}")
        return told

    def close(self) -> None:
        """Let all of them finish."""
        for tracker in self._trackers.values():
            with suppress(Exception):
                tracker.close()


class _TensorBoard(Tracker):
    def __init__(self, run_dir: str, name: str, recipe: Mapping[str, Any]) -> None:
        own = importlib.util.find_spec("tensorboard") is not None
        module = importlib.import_module("torch.utils.tensorboard" if own else "tensorboardX")
        self._writer: Any = module.SummaryWriter(f"{run_dir}/tensorboard")

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _MLflow(Tracker):
    def __init__(self, run_dir: str, name: str, recipe: Mapping[str, Any]) -> None:
        import mlflow

        self._mlflow = mlflow
        mlflow.set_experiment(str(recipe.get("name", "adaptive-platform")))
        mlflow.start_run(run_name=name)
        mlflow.log_params(_flat(recipe))

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        self._mlflow.log_metrics(dict(scalars), step=step)

    def close(self) -> None:
        self._mlflow.end_run()


class _Wandb(Tracker):
    def __init__(self, run_dir: str, name: str, recipe: Mapping[str, Any]) -> None:
        import wandb

        project = str(recipe.get("name", "adaptive-platform"))
        self._run = wandb.init(project=project, name=name, config=dict(recipe))

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        self._run.finish()


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {prefix: value}
    found: dict[str, Any] = {}
    for name, item in value.items():
        found |= _flat(item, f"{prefix}.{name}" if prefix else str(name))
    return found
