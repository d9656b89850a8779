"""What runs on each Ray Train worker: build everything from the recipe, train, say how it ended."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from adaptive_platform.checkpoints.store import CheckpointStore
from adaptive_platform.cluster.mailbox import MailboxClient
from adaptive_platform.cluster.recorder import Recorder
from adaptive_platform.cluster.rendezvous import device_of_worker, meet
from adaptive_platform.collectives import Membership
from adaptive_platform.data import wrap_dataset
from adaptive_platform.errors import UserError
from adaptive_platform.gradients.loss import SampleLoss
from adaptive_platform.models import is_convolutional
from adaptive_platform.recipe import Recipe
from adaptive_platform.report.journal import Journal
from adaptive_platform.training.run import TrainingRun

__all__ = ["Job", "train_worker"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What the driver hands to every worker."""

    recipe: Recipe
    run_dir: str
    mailbox: Any
    must_resume: bool
    model: Callable[[], nn.Module] | nn.Module | None = None
    """The user's own network, or how to make it; None for the recipe's."""
    train_data: Any = None
    """The user's own map-style data set; None for the recipe's."""
    eval_data: Any = None
    classes: tuple[str, ...] = ()
    loss: SampleLoss | None = None
    """The user's own losses per sample; None for the recipe's."""


def train_worker(job: Job, entered: float) -> None:
    """Train to the end, or until asked to stop. Errors that are the user's end the run at once.

    Anything else is raised: Ray Train then starts the workers again, up to `max_failures` times,
    and they go on from the newest checkpoint.

    Args:
        job: What to do.
        entered: When this worker was reached, in seconds since 1970.
    """
    membership = meet(job.recipe.reducer.timeout_seconds)
    first = membership.rank == 0
    mailbox = MailboxClient(job.mailbox) if first else None
    recorder = Recorder(mailbox, job.recipe.report.flush_seconds)
    store = CheckpointStore(job.run_dir) if first else None
    recorder.send("started", {"workers": entered, "met": time.time()})
    try:
        run = build_run(job, membership, device_of_worker(), store, recorder)
        recorder.send("started", {"built": time.time()})
        if first:
            recorder.open(Journal(job.run_dir, resume_step=run.progress.step))
        _loop(run, job)
        recorder.send("ended", ending(run))
    except UserError as error:
        # All workers raise it together; returning keeps Ray from trying again in vain.
        recorder.send("failed", {"message": str(error), "exit_code": 2})
    finally:
        recorder.close()


def build_run(
    job: Job,
    membership: Membership,
    device: torch.device,
    store: CheckpointStore | None,
    observer: Recorder,
) -> TrainingRun:
    """The run of one worker, from the recipe and what the user brought along."""
    if device.type == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    recipe = job.recipe
    if job.train_data is not None:
        source = wrap_dataset(job.train_data, job.eval_data, job.classes or None)
    else:
        source = recipe.data.open()
    if membership.rank == 0:
        for note in source.notes:
            observer.note(note)
    if job.model is None:
        model = recipe.model.build(len(source.classes), recipe.seed)
    elif isinstance(job.model, torch.nn.Module):
        model = job.model
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.seed)
            model = job.model()
    if job.model is not None and is_convolutional(model):
        model = model.to(memory_format=torch.channels_last)
    return TrainingRun(
        recipe,
        model.to(device),
        source,
        recipe.data,
        membership,
        loss=job.loss,
        store=store,
        observer=observer,
        must_resume=job.must_resume,
        makes_adversaries=True,
    )


def _loop(run: TrainingRun, job: Job) -> None:
    loss = job.loss or run.recipe.loss.build()
    device = next(run.model.parameters()).device
    try:
        for batch in run:
            with run.memory_guard():
                batch = run.with_adversaries(batch, loss)
                with run.recipe.precision.autocast(device.type):
                    outputs = run.model(batch.inputs)
                    losses = loss(outputs, batch.targets)
                run.backward(losses, outputs)
    finally:
        run.close()


def ending(run: TrainingRun) -> dict[str, Any]:
    """How a run stands at its end, for `result.json`."""
    state = run.state
    return {
        "status": "interrupted" if run.interrupted else "done",
        "accuracy": state.accuracy,
        "loss": state.loss,
        "steps": state.progress.step,
        "samples": state.progress.samples,
        "epochs": state.progress.epochs,
        "skipped_steps": state.progress.skipped_steps,
        "broken_samples": len(state.ledger.paths),
        "final_batch": state.global_batch,
        "workers": run.reducer.world_size,
    }
