"""Scores on held-out data: each sample once over all workers, sums added up at the end."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from adaptive_platform.collectives import Reducer
from adaptive_platform.data import (
    BrokenSample,
    DataConfig,
    MicroBatch,
    Samples,
    evaluation_batches,
)
from adaptive_platform.errors import DataError, RunFailedError, UserError
from adaptive_platform.gradients.loss import SampleLoss, correct_predictions
from adaptive_platform.gradients.precision import PrecisionConfig
from adaptive_platform.models import in_eval_mode
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
    # Loss, right predictions, predictions that can be right, samples, broken, failures; float64 so
    # that a count stays exact.
    sums = torch.zeros(6, dtype=torch.float64)
    batches = evaluation_batches(samples, config, reducer.rank, reducer.world_size, batch)
    failure: Exception | None = None
    try:
        with in_eval_mode(model):
            for microbatch in batches:
                sums[:4] += _sums_of(
                    model, microbatch.on(device, memory_format), loss, precision, device
                )
    except (UserError, RunFailedError) as error:
        failure = error  # The others wait for this worker's sums: all end together after them.
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


def _sums_of(
    model: nn.Module,
    batch: MicroBatch,
    loss: SampleLoss,
    precision: PrecisionConfig,
    device: torch.device,
) -> Tensor:
    """Loss, right predictions, predictions that can be right, and samples of one forward pass."""
    with precision.autocast(device.type):
        outputs = model(batch.inputs)
        losses = loss(outputs, batch.targets)
    if losses.shape != (len(batch),):
        raise UserError(
            f"loss: shape {tuple(losses.shape)} for {len(batch)} held-out samples; give "
            "one loss per sample, such as cross_entropy(..., reduction='none')."
        )
    correct = correct_predictions(outputs, batch.targets)
    scored = 0 if correct is None else len(batch)
    right = 0.0 if correct is None else float(correct)
    return torch.tensor([float(losses.sum()), right, scored, len(batch)], dtype=torch.float64)
