"""Everything that steers a run besides weights and optimizer: one list, saved and loaded whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from adaptive_platform.controllers import Controller
from adaptive_platform.controllers.worker_shares import WorkerShares
from adaptive_platform.data import BrokenLedger, deal_of
from adaptive_platform.errors import CheckpointError
from adaptive_platform.gradients.precision import LossScale
from adaptive_platform.optimizers import ListeningOptimizer, load_named_state, named_state
from adaptive_platform.progress import Progress
from adaptive_platform.statistics import NoiseScaleEstimator, VarianceReduction
from adaptive_platform.summary import GradientSummary
from adaptive_platform.training.previous_gradient import PreviousGradient
from adaptive_platform.training.speed import Speed

__all__ = ["RunState", "check_model", "load_checkpoint", "make_checkpoint"]


@dataclass(slots=True, kw_only=True)
class RunState:
    """The moving parts of a run; equal on all workers between steps."""

    progress: Progress
    seed: int
    """Fixes the order of the data: a position means nothing without it."""
    base_batch: int
    """The batch that the learning rate was chosen for when the run began."""
    global_batch: int
    """Batch of the next step."""
    initial_batch: int | None = None
    """Batch that the run began with; None where an older version began it."""
    loss_scale: LossScale
    estimator: NoiseScaleEstimator
    controller: Controller
    ledger: BrokenLedger
    shares: WorkerShares | None = None
    """How much of a step each worker takes; None where all take the same."""
    variance: VarianceReduction | None = None
    """Ratios that gradients are reduced by; None where the recipe has no `vr`."""
    speed: Speed = field(default_factory=Speed)
    previous_gradient: PreviousGradient = field(default_factory=PreviousGradient)
    hessian: float | None = None
    """Top eigenvalue at the last epoch's end; None where it isn't measured."""
    memory_limit: int | None = None
    """Largest micro-batch since memory ran out, in samples; None while it never did."""
    previous_lr: float = 0.0
    """Learning rate of the last committed step; 0 before the first."""
    skipped_in_a_row: int = 0
    best_accuracy: float | None = None
    best_loss: float | None = None
    """Of the evaluation at `best_step`; it is what counts where there is no accuracy."""
    best_step: int | None = None
    accuracy: float | None = None
    """Of the last evaluation."""
    loss: float | None = None
    """Of the last evaluation."""
    evaluated_at: Progress | None = None
    """Where the run stood at the last evaluation."""

    def summary(self) -> GradientSummary:
        """Everything that is measured and steers."""
        found = self.estimator.summary()
        return (
            replace(found, hessian_top_eigenvalue=self.hessian)
            if self.hessian is not None
            else found
        )

    @property
    def deal(self) -> tuple[int, ...] | None:
        """Who takes which position of a step; None where all take the same."""
        return deal_of(self.shares.parts) if self.shares is not None else None

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors, one entry per field."""
        return {
            "progress": self.progress.state_dict(),
            "seed": self.seed,
            "base_batch": self.base_batch,
            "global_batch": self.global_batch,
            "initial_batch": self.initial_batch,
            "loss_scale": self.loss_scale.state_dict(),
            "estimator": self.estimator.state_dict(),
            "controller": dict(self.controller.state_dict()),
            "ledger": self.ledger.state_dict(),
            "shares": self.shares.state_dict() if self.shares else None,
            "variance": self.variance.state_dict() if self.variance else None,
            "speed": self.speed.state_dict(),
            "previous_gradient": self.previous_gradient.state_dict(),
            "hessian": self.hessian,
            "memory_limit": self.memory_limit,
            "previous_lr": self.previous_lr,
            "skipped_in_a_row": self.skipped_in_a_row,
            "best_accuracy": self.best_accuracy,
            "best_loss": self.best_loss,
            "best_step": self.best_step,
            "accuracy": self.accuracy,
            "loss": self.loss,
            "evaluated_at": self.evaluated_at.state_dict() if self.evaluated_at else None,
        }

    def load(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Continue from `state_dict`; tensors go to `device`."""
        self.progress = Progress(**state["progress"])
        self.global_batch = int(state["global_batch"])
        self.initial_batch = state.get("initial_batch")
        self.loss_scale = self.loss_scale.going_on(LossScale(**state["loss_scale"]))
        self.estimator.load_state_dict(state["estimator"])
        self.controller.load_state_dict(state["controller"])
        self.ledger.load_state_dict(state["ledger"])
        if self.shares is not None and state.get("shares") is not None:
            self.shares.load_state_dict(state["shares"])
        if self.variance is not None and state["variance"] is not None:
            self.variance.load_state_dict(state["variance"], device)
        self.speed.load_state_dict(state["speed"])
        self.previous_gradient.load_state_dict(state["previous_gradient"])
        self.hessian = state["hessian"]
        self.memory_limit = state["memory_limit"]
        self.previous_lr = float(state["previous_lr"])
        self.skipped_in_a_row = int(state["skipped_in_a_row"])
        self.best_accuracy = state["best_accuracy"]
        self.best_loss = state.get("best_loss")  # not in checkpoints of earlier versions
        self.best_step = state["best_step"]
        self.accuracy = state["accuracy"]
        self.loss = state["loss"]
        self.base_batch = int(state["base_batch"])
        evaluated = state["evaluated_at"]
        self.evaluated_at = Progress(**evaluated) if evaluated else None


def make_checkpoint(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: RunState,
    *,
    kinds: Mapping[str, str],
    classes: tuple[str, ...],
) -> dict[str, Any]:
    """A checkpoint of plain tensors and values.

    `model` loads into the bare module at any worker count, since no wrapper ever renames its
    parameters.

    Args:
        model: The module.
        optimizer: Its state is stored by parameter name.
        state: What steers the run.
        kinds: Which controller and optimizer the states belong to.
        classes: Class names by number.
    """
    return {
        "model": {name: _plain(value) for name, value in model.state_dict().items()},
        "optimizer": named_state(optimizer, model.named_parameters()),
        "run": state.state_dict(),
        "kinds": dict(kinds),
        "classes": list(classes),
    }


def load_checkpoint(
    saved: Mapping[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: RunState,
    *,
    kinds: Mapping[str, str],
    classes: tuple[str, ...],
) -> list[str]:
    """Put a checkpoint into its owners.

    A state whose owner is of another kind now (the user chose another controller or optimizer) is
    left out, which the returned messages say.

    Raises:
        CheckpointError: Made for another model, other classes or another data set.
    """
    check_model(saved["model"], model)
    if tuple(saved["classes"]) != classes:
        raise CheckpointError(
            f"resume: the checkpoint's classes {_few(saved['classes'])} are not the data's "
            f"{_few(classes)}. Resume with the data it was made with."
        )
    if saved["run"]["seed"] != state.seed:
        raise CheckpointError(
            f"resume: seed = {state.seed}, the run was made with seed {saved['run']['seed']}. "
            "Another seed orders the data anew, so samples would come twice or never. Leave it."
        )
    size = saved["run"]["progress"]["dataset_size"]
    if size != state.progress.dataset_size:
        raise CheckpointError(
            f"resume: the checkpoint was made with {size} training samples, the data has "
            f"{state.progress.dataset_size} now. Its position means nothing in other data."
        )
    messages = []
    run = dict(saved["run"])
    was = saved["kinds"]
    if was["batch"] != kinds["batch"]:
        run["controller"] = state.controller.state_dict()
        run["global_batch"] = state.global_batch
        messages.append(f"batch.kind was {was['batch']}: {kinds['batch']} starts anew.")
    model.load_state_dict(saved["model"])
    if was["optimizer"] == kinds["optimizer"]:
        load_named_state(optimizer, model.named_parameters(), saved["optimizer"])
        if isinstance(optimizer, ListeningOptimizer):
            optimizer.load_natural_state(saved["natural"])
    else:
        messages.append(f"optimizer.kind was {was['optimizer']}: {kinds['optimizer']} starts anew.")
    state.load(run, next(model.parameters()).device)
    return messages


def check_model(saved: Mapping[str, Tensor], model: nn.Module) -> None:
    """Refuse weights of another model.

    Raises:
        CheckpointError: Names or shapes differ; the message shows the first ones.
    """
    now = model.state_dict()
    missing = [name for name in now if name not in saved]
    foreign = [name for name in saved if name not in now]
    shapes = [
        f"{name} {tuple(saved[name].shape)} instead of {tuple(now[name].shape)}"
        for name in now
        if name in saved and saved[name].shape != now[name].shape
    ]
    if missing or foreign or shapes:
        parts = [
            f"{what}: {_few(names)}"
            for what, names in (
                ("missing in it", missing),
                ("unknown to the model", foreign),
                ("of another shape", shapes),
            )
            if names
        ]
        raise CheckpointError(
            f"resume: the checkpoint is of another model ({'; '.join(parts)}). "
            "Use the recipe that made it, or start a new run."
        )


def _plain(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value


def _few(names: Any) -> str:
    shown = list(names)
    return ", ".join(map(str, shown[:3])) + (f" and {len(shown) - 3} more" if shown[3:] else "")
