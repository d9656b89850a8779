"""The one list of live metrics: exporters feed it, dashboards and alerts are made from it.

Prometheus knows them as Ray exports them, with `ray_` in front and `_total` behind counters. Counts
of what may never happen are gauges: Ray's counters can't begin at 0, and Ray's agent keeps
counters and histograms of a process that is gone, while gauges end some seconds after their run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from adaptive_platform.report.wording import known

__all__ = ["LABELS", "METRICS", "Metric", "metric", "step_gauges"]

LABELS = ("run", "recipe", "sweep")
"""On every series: the run's own name, its recipe's, and the sweep it belongs to or nothing."""

_PREFIX = "adaptive_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric of a run."""

    name: str
    """Short name, as in panels' queries; `full_name` is what Prometheus knows."""
    kind: Literal["gauge", "counter", "histogram"]
    help: str
    """What it is, in one sentence with its unit."""
    unit: str = "short"
    """Grafana's unit."""
    value: Callable[[Mapping[str, Any]], Any] | None = None
    """Reads a gauge from a step record's fields; None where it comes from elsewhere."""
    labels: tuple[str, ...] = ()
    """Labels besides `LABELS`."""
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram."""

    @property
    def ray_name(self) -> str:
        """Name to give to `ray.util.metrics`."""
        return _PREFIX + self.name

    @property
    def full_name(self) -> str:
        """Name in Prometheus; a histogram's has `_bucket`, `_sum` or `_count` behind it."""
        return f"ray_{self.ray_name}" + ("_total" if self.kind == "counter" else "")


def _column(name: str) -> Callable[[Mapping[str, Any]], Any]:
    return lambda fields: fields.get(name)


def _grad_norm(fields: Mapping[str, Any]) -> Any:
    square = fields.get("grad_sqnorm")
    return square**0.5 if known(square) and square is not None and square >= 0 else None


def _goodput(fields: Mapping[str, Any]) -> float:
    return float(fields.get("samples_per_second") or 0.0) * float(fields.get("efficiency") or 0.0)


def _compute(fields: Mapping[str, Any]) -> float:
    parts = ("data_seconds", "reduce_seconds", "statistics_seconds")
    rest = float(fields.get("step_seconds") or 0.0) - sum(float(fields.get(p) or 0) for p in parts)
    return max(rest, 0.0)


def _gauge(name: str, text: str, unit: str = "short", column: str = "") -> Metric:
    return Metric(name=name, kind="gauge", help=text, unit=unit, value=_column(column or name))


METRICS: tuple[Metric, ...] = (
    _gauge("global_batch", "Samples per optimizer step over all workers."),
    _gauge("microbatch", "Samples of one forward and backward on one worker."),
    _gauge("accumulation", "Micro-batches per worker and step."),
    _gauge("learning_rate", "Learning rate after schedule and rule.", "sci", "lr"),
    _gauge("gain", "AdaScale gain: base-batch steps that one step is worth."),
    _gauge("noise_scale", "Gradient noise scale S / G2 in samples."),
    _gauge("gsnr", "Median over layers of the gradient signal-to-noise ratio."),
    _gauge("efficiency", "Progress per sample against the base batch, 1 at best.", "percentunit"),
    _gauge("train_loss", "Mean loss of the step over the samples of all workers.", column="loss"),
    _gauge("train_accuracy", "Share of the step's samples that were right.", "percentunit",
           "accuracy"),
    Metric(name="grad_norm", kind="gauge", help="Norm of the averaged gradient before clipping.",
           value=_grad_norm),
    _gauge("samples_per_second", "Samples per second over all workers."),
    Metric(name="goodput", kind="gauge", value=_goodput,
           help="Samples per second times efficiency: base-batch samples' worth per second."),
    _gauge("world_size", "Workers that took part in the step."),
    _gauge("epoch", "Pass over the training set, from 0."),
    _gauge("scale_invariant_step", "Sum of gains so far, in base-batch steps."),
    _gauge("step_seconds", "Wall time of the newest step on the slowest worker.", "s"),
    _gauge("data_seconds", "Of a step: waiting for data.", "s"),
    _gauge("reduce_seconds", "Of a step: waiting for the reduction after backward.", "s"),
    _gauge("statistics_seconds", "Of a step: gradient statistics and decisions.", "s"),
    Metric(name="compute_seconds", kind="gauge", help="Of a step: everything else.", unit="s",
           value=_compute),
    Metric(name="progress", kind="gauge", help="Share of the run that is done.",
           unit="percentunit"),
    Metric(name="last_step_time", kind="gauge", help="When the newest step ended, Unix time.",
           unit="s"),
    Metric(name="eval_loss", kind="gauge", help="Held-out loss of the last evaluation."),
    Metric(name="eval_accuracy", kind="gauge", help="Held-out accuracy of the last evaluation.",
           unit="percentunit"),
    Metric(name="eval_seconds", kind="gauge", help="Wall time of the last evaluation.", unit="s"),
    Metric(name="checkpoint_seconds", kind="gauge", unit="s",
           help="Time to write the newest checkpoint, beside training."),
    Metric(name="last_checkpoint_time", kind="gauge", unit="s",
           help="When the newest checkpoint was published, Unix time."),
    Metric(name="decisions", kind="gauge", help="Decisions so far that changed the batch."),
    Metric(name="skipped_steps", kind="gauge", help="Steps so far that all workers dropped."),
    Metric(name="recoveries", kind="gauge",
           help="Times so far that workers began again, or went on without a lost one."),
    Metric(name="stragglers", kind="gauge",
           help="Times so far that a worker was found much slower than the others."),
    Metric(name="events", kind="gauge", help="Events so far by kind.", labels=("kind",)),
    Metric(name="steps", kind="counter", help="Committed optimizer steps."),
    Metric(name="samples", kind="counter", help="Samples that entered committed steps."),
    Metric(name="step_duration_seconds", kind="histogram", unit="s",
           help="Wall time of every step on the slowest worker.",
           buckets=(0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)),
)  # fmt: skip


def metric(name: str) -> Metric:
    """The metric of that short name.

    Raises:
        KeyError: There is none.
    """
    for found in METRICS:
        if found.name == name:
            return found
    raise KeyError(name)


def step_gauges(fields: Mapping[str, Any]) -> dict[str, float]:
    """Short name and value of every gauge that a step record feeds, where it has a number.

    A loss that is not finite is passed on, so that alerts can see it; other gaps are left out.
    """
    found = {}
    for each in METRICS:
        value: Any = each.value(fields) if each.value is not None else None
        if known(value) or (each.name == "train_loss" and isinstance(value, float)):
            found[each.name] = float(value)
    return found
