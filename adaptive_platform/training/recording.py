"""Records of a step and of a decision, made from what the loop knows when they are over."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict

from adaptive_platform.controllers import Decision
from adaptive_platform.data import MicroBatch
from adaptive_platform.progress import Progress
from adaptive_platform.report.records import DecisionRecord, StepRecord
from adaptive_platform.summary import GradientSummary
from adaptive_platform.training.forecast import Forecast
from adaptive_platform.training.measured import Measured

__all__ = ["decision_record", "step_record"]


def step_record(
    measured: Measured,
    *,
    before: Progress,
    after: Progress,
    microbatches: Sequence[MicroBatch],
    summary: GradientSummary,
    lr: float,
    gain: float,
    base_batch: int,
    world_size: int,
    seconds: float,
    data_seconds: float,
    cache_mib: float,
    sample_ids: list[list[int]] | None,
) -> StepRecord:
    """What is written down of a step.

    Args:
        measured: What all workers know of it.
        before: Where the run stood when it began.
        after: Where the run stands now.
        microbatches: Of this worker.
        summary: The statistics after the step.
        lr: Learning rate that was used; 0 where the step was dropped.
        gain: Its worth in base-batch steps; 0 where it was dropped.
        base_batch: The batch that gain and efficiency refer to.
        world_size: Workers that took part.
        seconds: Wall time of the whole step.
        data_seconds: Of these, waiting for data.
        cache_mib: Encoded images that this worker holds in memory.
        sample_ids: Of each worker, where the recipe asks for them.
    """
    return StepRecord(
        step=before.step + 1,
        epoch=before.epoch,
        samples_seen=after.samples,
        scale_invariant_step=after.scale_invariant_steps,
        world_size=world_size,
        global_batch=measured.trained,
        microbatch=max(map(len, microbatches), default=0),
        accumulation=len(microbatches),
        lr=lr,
        gain=gain,
        loss=measured.loss,
        accuracy=measured.accuracy,
        grad_sqnorm=measured.grad_sqnorm,
        noise_scale=summary.noise_scale,
        noise_trace=summary.noise_trace,
        signal_sqnorm=summary.signal_sqnorm,
        biased=summary.biased,
        preconditioned=summary.preconditioned,
        gsnr=summary.gsnr,
        hessian_top_eigenvalue=summary.hessian_top_eigenvalue,
        efficiency=summary.efficiency(max(measured.trained, 1), base_batch),
        samples_per_second=measured.trained / seconds if seconds > 0.0 else 0.0,
        step_seconds=seconds,
        data_seconds=data_seconds,
        cache_mib=cache_mib,
        reduce_seconds=measured.reduce_seconds,
        statistics_seconds=measured.statistics_seconds,
        skipped=not measured.counts,
        time=time.time(),
        sample_ids=sample_ids,
    )


def decision_record(
    decision: Decision,
    *,
    kind: str,
    old_batch: int,
    progress: Progress,
    expected: Forecast | None,
) -> DecisionRecord:
    """What is written down of a decision.

    Args:
        decision: What the controller answered.
        kind: Of the controller.
        old_batch: The batch before.
        progress: Where the run stood.
        expected: What the change should bring; None where nothing changes.
    """
    return DecisionRecord(
        step=progress.step,
        epoch=progress.epoch,
        samples_seen=progress.samples,
        kind=kind,
        old_batch=old_batch,
        new_batch=decision.global_batch,
        reason=decision.reason,
        inputs=json.dumps(dict(decision.inputs)),
        candidates=json.dumps([asdict(c) for c in decision.candidates]),
        predicted_gain=expected.gain if expected else None,
        predicted_slowdown=expected.slowdown if expected else None,
        time=time.time(),
    )
