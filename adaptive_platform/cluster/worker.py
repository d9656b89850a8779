"""What runs on each Ray Train worker: build everything from the recipe, train, say how it ended."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
import torch
from torch import nn

from adaptive_platform.checkpoints.store import CheckpointStore
from adaptive_platform.cluster.link import MembershipLink
from adaptive_platform.cluster.mailbox import MailboxClient
from adaptive_platform.cluster.recorder import Recorder
from adaptive_platform.cluster.rendezvous import alone, device_of_worker, meet, vote
from adaptive_platform.collectives import CollectiveError, Membership
from adaptive_platform.data import DataSource, wrap_dataset
from adaptive_platform.errors import RunFailedError, UserError
from adaptive_platform.gradients.loss import SampleLoss
from adaptive_platform.models import is_convolutional
from adaptive_platform.recipe import Recipe
from adaptive_platform.report.journal import Journal
from adaptive_platform.training.run import TrainingRun

__all__ = ["Job", "Recruitment", "train_worker"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recruitment:
    """What a worker that joins later is told besides the job."""

    attempt: str
    """The attempt of Ray Train that it belongs to."""
    name: str
    """Its own, unique within the run."""


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


def train_worker(job: Job, entered: float, recruited: Recruitment | None = None) -> None:
    """Train to the end, or until asked to stop or to leave. The user's errors end the run at once.

    A lost peer costs the step in hand where the others can go on (`MembershipLink`). Otherwise the
    error is raised: Ray Train then starts the workers again, up to `max_failures` times, and they
    go on from the newest checkpoint.

    Args:
        job: What to do.
        entered: When this worker was reached, in seconds since 1970.
        recruited: For a worker that joins a run under way; None for those that Ray Train started.
    """
    final = ray.get(job.mailbox.final.remote())
    if final is not None:
        return  # Ray tried again after an error that stays; the driver knows it already.
    device = device_of_worker()
    if device.type == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    else:
        torch.cuda.set_device(device)  # of this thread, which trains
    recipe = job.recipe
    recorder = Recorder(
        MailboxClient(job.mailbox),
        recipe.report.flush_seconds,
        open_journal=lambda step: Journal(job.run_dir, resume_step=step),
        first=False,
    )
    if recruited is None:
        _start(job, entered, device, recorder)
    else:
        _join(job, recruited, device, recorder)


def _start(job: Job, entered: float, device: torch.device, recorder: Recorder) -> None:
    """A worker that Ray Train started, together with all others."""
    recipe = job.recipe
    membership, attempt = meet(recipe.reducer.timeout_seconds)
    link = None
    if recipe.is_live:
        link = _link(job, attempt, f"{attempt}/{membership.rank}", recorder)
        link.enroll(membership.rank, membership.world_size)
    if membership.rank == 0:
        recorder.be_first()
    recorder.send("started", {"workers": entered, "met": time.time()})

    def build() -> TrainingRun:
        run = build_run(job, membership, recorder, device, link)
        recorder.send("started", {"built": time.time()})
        batches = {"initial": run.state.initial_batch, "now": run.state.global_batch}
        recorder.send("batch", batches)
        if run.is_first:
            journal = Journal(
                job.run_dir,
                resume_step=run.progress.step,
                skipped=run.state.skipped_in_a_row,
                epoch=run.progress.epoch,
            )
            recorder.open(journal)
        return run

    _train(job, build, recorder, link, single=membership.world_size == 1, recruited=False)


def _join(job: Job, recruited: Recruitment, device: torch.device, recorder: Recorder) -> None:
    """A worker that takes a place in a run under way; it prepares itself before others wait."""
    source = _open(job)
    model = _make_model(job, source).to(device)
    link = _link(job, recruited.attempt, recruited.name, recorder, joining=True)

    def build() -> TrainingRun:
        return _training_run(job, model, source, alone(), recorder, link, joining=True)

    _train(job, build, recorder, link, single=False, recruited=True)


def _link(
    job: Job, attempt: str, name: str, recorder: Recorder, *, joining: bool = False
) -> MembershipLink:
    return MembershipLink(
        job.mailbox,
        attempt,
        name,
        timeout_seconds=job.recipe.reducer.timeout_seconds,
        changing=recorder.changing,
        joining=joining,
    )


def _train(
    job: Job,
    build: Callable[[], TrainingRun],
    recorder: Recorder,
    link: MembershipLink | None,
    *,
    single: bool,
    recruited: bool,
) -> None:
    run: TrainingRun | None = None
    try:
        run = build()
        _loop(run, job)
        run.close()
        if run.is_first and not run.left:
            recorder.send("ended", ending(run))
        recorder.close()
        if link is not None and not run.left:
            link.finish()
        elif link is not None and not recruited:
            link.wait_for_end()  # Ray Train takes a group whose workers have returned for done.
    except CollectiveError as error:
        if link is not None and link.cut_off:
            traceback.print_exc()
            # Nobody is there to end the process, and it must not touch the run again.
            os._exit(1)
        if link is not None:
            link.lose(str(error))
        raise  # Peers are gone; a new attempt without them can go on.
    except (UserError, RunFailedError) as error:
        if recruited and link is not None and (run is None or run.joining):
            # Its own trouble, such as data that its node has only half of: the others go on.
            link.lose(f"it could not join: {error}")
            raise
        code = 2 if isinstance(error, UserError) else 1
        ray.get(job.mailbox.end.remote({"message": str(error), "exit_code": code}))
        if not single and not getattr(error, "agreed", False):
            raise  # The others do not know; they must not wait for the time limit.
    except Exception as error:
        if link is not None and link.lose(f"{type(error).__name__}: {error}"):
            traceback.print_exc()
            # The others go on. The process ends, so that its place is free for another one.
            os._exit(1)
        raise
    finally:
        if run is not None:
            run.close()
        recorder.close()


def build_run(
    job: Job,
    membership: Membership,
    recorder: Recorder,
    device: torch.device,
    link: MembershipLink | None,
) -> TrainingRun:
    """The run of one worker, from the recipe and what the user brought along.

    Raises:
        UserError: Data, model or checkpoint can't be used; on every worker alike.
    """
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
    return _training_run(job, model.to(device), source, membership, recorder, link, joining=False)


def _training_run(
    job: Job,
    model: nn.Module,
    source: DataSource,
    membership: Membership,
    recorder: Recorder,
    link: MembershipLink | None,
    *,
    joining: bool,
) -> TrainingRun:
    return TrainingRun(
        job.recipe,
        model,
        source,
        job.recipe.data,
        membership,
        loss=job.loss,
        store=CheckpointStore(job.run_dir, recorder.saved_in),
        observer=recorder,
        must_resume=job.must_resume,
        regrouping=link,
        joining=joining,
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
