"""Scores on held-out data: each sample once over all workers, sums added up at the end."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import nn

from adaptive_platform.collectives import Reducer
from adaptive_platform.data import BrokenSample, DataConfig, Samples, evaluation_batches
from adaptive_platform.errors import DataError, RunFailedError, UserError
from adaptive_platform.gradients.loss import SampleLoss, correct_predictions
from adaptive_platform.gradients.precision import PrecisionConfig
from adaptive_platform.training.unison import raise_first

__all__ = ["Score", "evaluate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The result of one pass; equal on all workers except for `broken`."""

    loss: float
    accuracy: float | None
    samples: int
    num_broken: int
    """Samples of all workers that could not be read."""
    broken: list[BrokenSample]
    """This worker's own."""
    seconds: float


@torch.no_grad()
def evaluate(
    model: nn.Module,
    samples: Samples,
    config: DataConfig,
    loss: SampleLoss,
    reducer: Reducer,
    *,
    precision: PrecisionConfig,
    device: torch.device,
    memory_format: torch.memory_format,
    batch: int,
) -> Score:
    """Score `model` on all of `samples`, shared out over the workers of `reducer`.

    The model's buffers have to agree on all workers before; its training mode is put back.

    Args:
        model: Module on `device`.
        samples: Held-out set.
        config: Transform and policy for broken samples.
        loss: Losses per sample.
        reducer: Adds up sums and counts.
        precision: Autocast as in training.
        device: Where batches go.
        memory_format: Layout of 4-D inputs.
        batch: Samples of one forward pass.

    Raises:
        UserError: `loss` gives no loss per sample, or data can't be read; on every worker alike.
    """
    started = time.perf_counter()
    was_training = model.training
    model.eval()
    # Loss, right predictions, predictions that can be right, samples, broken, failures; float64 so
    # that a count stays exact.
    sums = torch.zeros(6, dtype=torch.float64)
    batches = evaluation_batches(samples, config, reducer.rank, reducer.world_size, batch)
    failure: Exception | None = None
    try:
        for microbatch in batches:
            moved = microbatch.on(device, memory_format)
            with precision.autocast(device.type):
                outputs = model(moved.inputs)
                losses = loss(outputs, moved.targets)
            if losses.shape != (len(moved),):
                raise UserError(
                    f"loss: shape {tuple(losses.shape)} for {len(moved)} held-out samples; give "
                    "one loss per sample, such as cross_entropy(..., reduction='none')."
                )
            sums[0] += losses.sum().double().cpu()
            correct = correct_predictions(outputs, moved.targets)
            if correct is not None:
                sums[1] += correct.double().cpu()
                sums[2] += len(moved)
            sums[3] += len(moved)
    except (UserError, RunFailedError) as error:
        failure = error  # The others wait for this worker's sums: all end together after them.
    finally:
        model.train(was_training)
    sums[4] = len(batches.broken)
    sums[5] = float(failure is not None)
    total = sums.to(device=device)
    reducer.all_reduce(total)
    loss_sum, right, scored, count, broken, failures = total.tolist()
    if failures:
        raise_first(reducer, failure)
    if not count:
        raise DataError(
            f"data: none of the {len(samples)} held-out samples could be read, so there is no "
            "score. Mend them, or leave data.eval away."
        )
    return Score(
        loss=loss_sum / count,
        accuracy=right / scored if scored else None,
        samples=round(count),
        num_broken=round(broken),
        broken=batches.broken,
        seconds=time.perf_counter() - started,
    )
