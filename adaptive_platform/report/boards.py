"""What the Grafana dashboards show and when Prometheus warns: panels and alert rules as lists."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from adaptive_platform.report.metrics import metric

__all__ = ["ALERTS", "COMPARE", "ELASTICITY", "RUN", "SWEEP", "Panel"]

_RATE = "$__rate_interval"


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel."""

    title: str
    note: str
    """One sentence that says how to read it."""
    queries: tuple[tuple[str, str], ...]
    """PromQL and legend. `NAME@` stands for a metric of the list, with the dashboard's selector."""
    unit: str = "short"
    kind: str = "timeseries"
    log: bool = False
    """Logarithmic axis."""


def _line(name: str, title: str, note: str = "", **more: Any) -> Panel:
    """A panel of one gauge."""
    known = metric(name)
    return Panel(
        title=title,
        note=note or known.help,
        queries=((f"{name}@", "{{run}}"),),
        unit=known.unit,
        **more,
    )


_RATE_OF_STEPS = (f"rate(steps@[{_RATE}]) and on (run) progress@", "{{run}}")
_ACCURACY = _line("eval_accuracy", "Held-out accuracy")
_LOSS = Panel(
    title="Loss",
    note="Mean over the samples of all workers, and held-out.",
    queries=(("train_loss@", "{{run}} training"), ("eval_loss@", "{{run}} held-out")),
)
_BATCH = _line("global_batch", "Global batch")
_NOISE = Panel(
    title="Gradient noise scale",
    note="Batch at which noise equals signal, and the batch in use.",
    queries=(("noise_scale@", "{{run}} noise scale"), ("global_batch@", "{{run}} batch")),
    log=True,
)
_SPLIT = Panel(
    title="Where a step's time goes",
    note="Newest step: waiting for data, waiting for the reduction, statistics, everything else.",
    queries=tuple(
        (f"avg by (run) ({part}_seconds@)", f"{{{{run}}}} {part}")
        for part in ("compute", "data", "reduce", "statistics")
    ),
    unit="s",
)
_QUANTILES = Panel(
    title="Step time",
    note="Median and 95th percentile of all steps, on the slowest worker.",
    queries=tuple(
        (
            f"histogram_quantile({share}, sum by (le, run) "
            f"(rate(step_duration_seconds:bucket@[{_RATE}]))) and on (run) progress@",
            f"{{{{run}}}} {told}",
        )
        for share, told in ((0.5, "median"), (0.95, "95 %"))
    ),
    unit="s",
)
_WORKERS = _line("world_size", "Workers")
_THROUGHPUT = _line("samples_per_second", "Throughput")
_GOODPUT = _line("goodput", "Goodput")
_SKIPPED = _line("skipped_steps", "Skipped steps")
_RECOVERIES = _line("recoveries", "Recoveries")

RUN = (
    _line("progress", "Progress", kind="gauge"),
    _line("eval_accuracy", "Accuracy now", kind="stat"),
    _line("global_batch", "Batch now", kind="stat"),
    _line("world_size", "Workers now", kind="stat"),
    _LOSS,
    Panel(
        title="Accuracy",
        note="Share of samples that were right.",
        queries=(
            ("train_accuracy@", "{{run}} training"),
            ("eval_accuracy@", "{{run}} held-out"),
        ),
        unit="percentunit",
    ),
    _NOISE,
    _line("learning_rate", "Learning rate"),
    _line("gain", "AdaScale gain"),
    _line("gsnr", "Gradient signal-to-noise ratio", log=True),
    _line("efficiency", "Statistical efficiency"),
    Panel(
        title="Throughput and goodput",
        note="Samples per second, and what they are worth in base-batch samples.",
        queries=(
            ("samples_per_second@", "{{run}} throughput"),
            ("goodput@", "{{run}} goodput"),
        ),
    ),
    _SPLIT,
    _QUANTILES,
    Panel(
        title="Shape of a step",
        note="Micro-batch per worker, and how many are accumulated.",
        queries=(("microbatch@", "{{run}} micro-batch"), ("accumulation@", "{{run}} accumulated")),
    ),
    _line("decisions", "Decisions"),
    Panel(
        title="Beside the steps",
        note="Wall time of the newest evaluation, and of the newest checkpoint's writing.",
        queries=(
            ("eval_seconds@", "{{run}} evaluation"),
            ("checkpoint_seconds@", "{{run}} checkpoint"),
        ),
        unit="s",
    ),
    _line("grad_norm", "Gradient norm", log=True),
    Panel(title="Steps per second", note="Committed steps.", queries=(_RATE_OF_STEPS,)),
)
COMPARE = (
    _ACCURACY,
    _LOSS,
    _BATCH,
    _line("learning_rate", "Learning rate"),
    _line("efficiency", "Statistical efficiency"),
    _GOODPUT,
    _THROUGHPUT,
    _line("scale_invariant_step", "Scale-invariant steps"),
    _line("epoch", "Epoch"),
    Panel(
        title="Samples per second, averaged",
        note="From the counter of samples: committed ones only.",
        queries=((f"rate(samples@[{_RATE}]) and on (run) progress@", "{{run}}"),),
    ),
)
ELASTICITY = (
    _WORKERS,
    Panel(
        title="Events",
        note="What happened so far, by kind: joined, left, lost, resize, checkpoint, stop ...",
        queries=(("sum by (run, kind) (events@)", "{{run}} {{kind}}"),),
    ),
    _RECOVERIES,
    _SKIPPED,
    Panel(
        title="Seconds since the newest step",
        note="Climbs while a run stands still.",
        queries=(("time() - last_step_time@", "{{run}}"),),
        unit="s",
    ),
    Panel(
        title="Training that a crash would cost",
        note="Time since the newest checkpoint: what is made again where nobody survives.",
        queries=(("time() - last_checkpoint_time@", "{{run}}"),),
        unit="s",
    ),
    _line("checkpoint_seconds", "Checkpoint time"),
    _line("stragglers", "Slow workers"),
    _THROUGHPUT,
    _line("reduce_seconds", "Waiting for the reduction"),
    _line("step_seconds", "Newest step"),
)
SWEEP = (
    Panel(
        title="Trials that run",
        note="Trials with live metrics.",
        queries=(("count by (sweep) (progress@)", "{{sweep}}"),),
        kind="stat",
    ),
    Panel(
        title="Best accuracy so far",
        note="Of the trials that run.",
        queries=(("max by (sweep) (eval_accuracy@)", "{{sweep}}"),),
        unit="percentunit",
        kind="stat",
    ),
    _line("progress", "Progress of each trial"),
    _ACCURACY,
    _LOSS,
    _line("learning_rate", "Learning rate"),
    _BATCH,
    _GOODPUT,
)

ALERTS = (
    (
        "AdaptiveRunNoProgress",
        "time() - last_step_time@ > 600",
        "1m",
        "critical",
        "{{ $labels.run }} has taken no step for ten minutes",
        "Look at the workers' logs: a hung collective, a full disk, or no resources to go on with.",
    ),
    (
        "AdaptiveRunLossNotFinite",
        "(train_loss@ != train_loss@) or (delta(skipped_steps@[5m]) > 5)",
        "1m",
        "critical",
        "{{ $labels.run }} has losses that are not finite",
        "Its steps are skipped. Lower the learning rate, or look for broken data.",
    ),
    (
        "AdaptiveRunEfficiencyLow",
        "efficiency@ < 0.2",
        "15m",
        "warning",
        "{{ $labels.run }} learns little from each sample",
        "The batch is far above the noise scale: lower batch.max_batch, or use fewer workers.",
    ),
    (
        "AdaptiveRunRecoveryLoop",
        "delta(recoveries@[15m]) >= 3",
        "0m",
        "critical",
        "{{ $labels.run }} began again three times within fifteen minutes",
        "Look at the first failure in its events; a node or a sample may bring it down each time.",
    ),
    (
        "AdaptiveRunSlowWorker",
        "delta(stragglers@[15m]) > 0.5",
        "0m",
        "warning",
        "{{ $labels.run }} waits for a worker that is much slower than the others",
        "Its events name the worker: look what else runs there, at clocks, heat and the network.",
    ),
)  # fmt: skip
