"""What runs on each Ray Train worker: build everything from the recipe, train, say how it ended."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
import torch
from torch import nn

from adaptive_platform.checkpoints.store import CheckpointStore
from adaptive_platform.cluster.mailbox import MailboxClient
from adaptive_platform.cluster.recorder import Recorder
from adaptive_platform.cluster.rendezvous import device_of_worker, meet, vote
from adaptive_platform.collectives import CollectiveError, Membership
from adaptive_platform.data import DataSource, wrap_dataset
from adaptive_platform.errors import RunFailedError, UserError
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
    final = ray.get(job.mailbox.final.remote())
    if final is not None:
        return  # Ray tried again after an error that stays; the driver knows it already.
    membership = meet(job.recipe.reducer.timeout_seconds)
    first = membership.rank == 0
    recorder = Recorder(
        MailboxClient(job.mailbox) if first else None, job.recipe.report.flush_seconds
    )
    recorder.send("started", {"workers": entered, "met": time.time()})
    run: TrainingRun | None = None
    try:
        run = build_run(job, membership, recorder)
        recorder.send("started", {"built": time.time()})
        if first:
            recorder.open(Journal(job.run_dir, resume_step=run.progress.step))
        _loop(run, job)
        run.close()
        recorder.send("ended", ending(run))
    except CollectiveError:
        raise  # A peer is gone; a new attempt without it can go on.
    except (UserError, RunFailedError) as error:
        code = 2 if isinstance(error, UserError) else 1
        ray.get(job.mailbox.end.remote({"message": str(error), "exit_code": code}))
        if membership.world_size > 1 and not getattr(error, "agreed", False):
            raise  # The others do not know; they must not wait for the time limit.
    finally:
        if run is not None:
            run.close()
        recorder.close()


def build_run(job: Job, membership: Membership, recorder: Recorder) -> TrainingRun:
    """The run of one worker, from the recipe and what the user brought along.

    Raises:
        UserError: Data, model or checkpoint can't be used; on every worker alike.
    """
    recipe = job.recipe
    device = device_of_worker()
    if device.type == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    source, model, error = None, None, None
    try:
        source = _open(job)
        model = _make_model(job, source)
    except UserError as failure:
        error = failure
    try:
        vote(membership, error)
    except UserError as failure:
        failure.agreed = True  # type: ignore[attr-defined]
        raise
    assert source is not None
    assert model is not None
    for note in source.notes if membership.rank == 0 else ():
        recorder.note(note)
    return TrainingRun(
        recipe,
        model.to(device),
        source,
        recipe.data,
        membership,
        loss=job.loss,
        store=CheckpointStore(job.run_dir) if membership.rank == 0 else None,
        observer=recorder,
        must_resume=job.must_resume,
        makes_adversaries=True,
    )


def _open(job: Job) -> DataSource:
    if job.train_data is not None:
        return wrap_dataset(job.train_data, job.eval_data, job.classes or None)
    return job.recipe.data.open()


def _make_model(job: Job, source: DataSource) -> nn.Module:
    if job.model is None:
        return job.recipe.model.build(len(source.classes), job.recipe.seed)
    if isinstance(job.model, nn.Module):
        model = job.model
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(job.recipe.seed)
            model = job.model()
    return model.to(memory_format=torch.channels_last) if is_convolutional(model) else model


def _loop(run: TrainingRun, job: Job) -> None:
    loss = job.loss or run.recipe.loss.build()
    for batch in run:
        with run.memory_guard():
            batch = run.with_adversaries(batch, loss)
            with run.autocast():
                outputs = run.model(batch.inputs)
                losses = loss(outputs, batch.targets)
            run.backward(losses, outputs)


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
