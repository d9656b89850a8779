"""What a run writes down: one record type per table, and the result of the whole run.

The field names of `StepRecord` are column names people build on: adding is free, renaming is not.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["DecisionRecord", "EvalRecord", "EventRecord", "RunResult", "StepRecord"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step that all workers took together. Sums and means run over all workers' samples."""

    step: int
    """Number of the step, from 1. A skipped step carries the number it would have had, so the
    next committed step has the same one."""
    epoch: int
    """Pass over the training set that the step's samples came from, from 0."""
    samples_seen: int
    """Samples that entered committed steps so far, this one included."""
    scale_invariant_step: float
    """Sum of gains so far: steps that the base batch would have needed."""
    world_size: int
    """Workers that took part."""
    global_batch: int
    """Samples of this step over all workers."""
    microbatch: int
    """Samples of one forward and backward pass of the first worker; its largest, where they
    differ. Other workers may have one more or less."""
    accumulation: int
    """Micro-batches of the first worker; others may have one more or less."""
    lr: float
    """Learning rate that the optimizer used, after schedule and rule. The first group's."""
    gain: float
    """AdaScale gain: what the step is worth in base-batch steps."""
    loss: float
    """Mean loss over the samples of all workers; NaN or infinite only where `skipped`."""
    grad_sqnorm: float
    """Squared norm of the averaged gradient, before clipping."""
    noise_scale: float | None = None
    """S / G2 in samples; None while it can't be estimated."""
    noise_trace: float | None = None
    """S, smoothed: trace of a single example's gradient covariance; None before any estimate."""
    signal_sqnorm: float | None = None
    """G2, smoothed: squared norm of the true gradient; may be negative while noise hides it."""
    biased: bool = False
    """True where one micro-batch per step forced the estimate from consecutive gradients."""
    preconditioned: bool = False
    """True where noise is measured on gradients times Adam's preconditioner, so that
    `noise_trace` and `signal_sqnorm` have not the unit of `grad_sqnorm`."""
    hessian_top_eigenvalue: float | None = None
    """Top eigenvalue of the loss's Hessian at the last epoch's end; None where not measured."""
    gsnr: float | None = None
    """Median over layers of a single example's gradient signal-to-noise ratio; None where layers
    are not measured."""
    efficiency: float = 1.0
    """Progress per sample against the base batch: gain * base batch / batch."""
    samples_per_second: float = 0.0
    """Samples of this step over all workers, divided by `step_seconds`."""
    step_seconds: float = 0.0
    """Wall time of the step on the first worker: its wait for data, and its wait for the others
    when gradients are summed, are part of it."""
    data_seconds: float = 0.0
    """Part of `step_seconds` that the first worker spent waiting for data."""
    cache_mib: float = 0.0
    """Encoded images that the first worker holds in memory (`data.cache_mib`), in MiB; the others
    hold about as much each."""
    reduce_seconds: float = 0.0
    """Part of `step_seconds` spent waiting for the reduction, after backward had ended."""
    statistics_seconds: float = 0.0
    """Part of `step_seconds` spent on gradient statistics and decisions."""
    skipped: bool = False
    """True where all workers agreed to drop the step (a non-finite value)."""
    accuracy: float | None = None
    """Share of the step's samples that the model had right, in [0, 1]; None for other tasks."""
    time: float = 0.0
    """When the step ended, in seconds since 1970."""
    sample_ids: list[list[int]] | None = None
    """Ids of the samples that each worker took, where the recipe asks for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRecord:
    """One decision of the batch controller, also where it decided to change nothing."""

    step: int
    """Committed steps when the decision was taken; it holds from the next step on."""
    epoch: int
    """Pass over the training set, from 0."""
    samples_seen: int
    """Samples that entered committed steps so far."""
    kind: str
    """Kind of the controller, such as `noise_scale`."""
    old_batch: int
    """Global batch before, in samples."""
    new_batch: int
    """Global batch after, in samples."""
    reason: str
    """Why, in one sentence for people."""
    inputs: str = "{}"
    """What the controller was told, as JSON."""
    candidates: str = "[]"
    """What it chose from and how each scored, as JSON."""
    predicted_gain: float | None = None
    """What a step at the new batch should be worth, in steps at the old one, by the noise known
    then; None where the batch stays or noise was not known."""
    predicted_slowdown: float | None = None
    """How long a step at the new batch should take, in steps at the old one, by the speed known
    then; None where the batch stays or no step was timed."""
    time: float = 0.0
    """When, in seconds since 1970."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRecord:
    """One pass over held-out data. Scores cover exactly `samples` samples, each once."""

    step: int
    """Committed steps of the model that was scored."""
    epoch: int
    """Pass over the training set, from 0."""
    samples_seen: int
    """Samples that entered committed steps so far."""
    loss: float
    """Mean loss over the held-out samples."""
    accuracy: float | None = None
    """Share of the held-out samples that were right, in [0, 1]; None for other tasks."""
    samples: int = 0
    """Held-out samples that were scored."""
    broken: int = 0
    """Held-out samples that could not be read and were left out."""
    seconds: float = 0.0
    """Wall time of the pass."""
    time: float = 0.0
    """When it ended, in seconds since 1970."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRecord:
    """Something that happened to the run and is neither a step, a decision nor an evaluation."""

    time: float
    """When, in seconds since 1970."""
    step: int
    """Committed steps at that time."""
    kind: str
    """`resize`, `checkpoint`, `broken_sample`, `stop`, `resume`, `warning` ..."""
    text: str
    """What happened, in one sentence for people."""
    seconds: float | None = None
    """How long it took, from the first byte to the last of a `checkpoint`; None where not timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """How a run ended: the content of `result.json`."""

    status: str
    """`done`, `interrupted` (stopped by a signal, can be resumed) or `failed`."""
    exit_code: int
    """0 done, 1 failed, 2 wrong input, 130 or 143 stopped by a signal."""
    message: str = ""
    """Why it ended, in one sentence; the cause where it failed."""
    accuracy: float | None = None
    """Held-out accuracy of the last evaluation, in [0, 1]."""
    loss: float | None = None
    """Held-out loss of the last evaluation; None where there was none."""
    steps: int = 0
    """Committed optimizer steps, earlier attempts included."""
    samples: int = 0
    """Samples that entered committed steps."""
    epochs: float = 0.0
    """Samples / size of the training set."""
    skipped_steps: int = 0
    """Steps that all workers dropped."""
    broken_samples: int = 0
    """Training samples that could not be read and were left out, each counted once."""
    seconds: float = 0.0
    """Wall time of this attempt, from the command to the end."""
    startup_seconds: dict[str, float] = field(default_factory=dict)
    """Parts of the time from the command to the first committed step, in order, in seconds."""
    decisions: int = 0
    """Decisions that changed the batch."""
    initial_batch: int | None = None
    """Global batch that the run began with, in its first attempt."""
    final_batch: int | None = None
    """Global batch in force at the end, a short last step of an epoch aside."""
    workers: int | None = None
    """Workers at the end."""
    outputs: dict[str, str] = field(default_factory=dict)
    """Where things lie: what it is, and its path."""
