"""What all workers know about a step once it is reduced, and where it rides in the last bucket."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from adaptive_platform.statistics import StepMoments

__all__ = ["RIDER_SLOTS", "Measured", "Slot"]


class Slot(IntEnum):
    """Place in the rider; each holds a sum over workers after the reduction."""

    SQNORM = 0
    INVERSE = 1
    MICROBATCHES = 2
    SAMPLES = 3
    LOSS = 4
    CORRECT = 5
    SCORED = 6
    STOP = 7
    BROKEN = 8
    FATAL = 9
    OUT_OF_MEMORY = 10
    CHANGE = 11
    DURABLE = 12
    OWN_SQNORM = 13
    PRESENT = 14


RIDER_SLOTS = len(Slot)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What all workers know about a step once it is reduced; equal on all of them."""

    finite: bool
    """The vote: False when any worker met a non-finite loss or gradient."""
    trained: int
    """Samples that entered the gradient."""
    loss: float
    """Mean loss over those samples."""
    accuracy: float | None
    """Share of right predictions; None where outputs are not class scores."""
    grad_sqnorm: float
    """Squared norm of the mean gradient, loss scale undone, before clipping; where workers step
    alone, the mean over them."""
    moments: StepMoments | None
    """Squared norms and counts for the estimators; None where the step was not measured."""
    num_microbatches: int
    """Micro-batches of all workers."""
    stop_requests: int
    """Workers that were asked to stop."""
    broken: int
    """Samples that could not be read in this step."""
    fatal: int
    """Workers that met an error which ends the run."""
    out_of_memory: int
    """Workers whose memory did not hold a micro-batch; the step is then of no use."""
    change_requests: int
    """Workers that know that the membership is to change."""
    durable_step: int
    """Records of earlier steps are durable."""
    paces: tuple[float, ...]
    """Seconds per sample of each worker's own passes, by rank; 0 for one without samples.
    On GPUs those of the step before, since the device tells them only now."""
    reduce_seconds: float
    """Time this worker waited for the reduction after its backward had ended."""
    statistics_seconds: float
    """Time this worker spent on squared norms."""

    @property
    def counts(self) -> bool:
        """True when the step may be committed."""
        return self.finite and self.trained > 0
