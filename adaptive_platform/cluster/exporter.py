"""Live metrics of a run, handed to Ray from the mailbox's process, so that no step waits."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from adaptive_platform.report.metrics import LABELS, METRICS, step_gauges
from adaptive_platform.report.wording import known

__all__ = ["Exporter"]

_AGAIN_SECONDS = 5.0
_FROM_ZERO = ("decisions", "skipped_steps", "recoveries", "stragglers")


class Exporter:
    """Turns messages into `ray.util.metrics`.

    Its process ends with the run, and its gauges with it; that of the workers would end with each
    attempt, and counts of what happened to the run would begin again.

    Args:
        labels: A value for each of `LABELS`.
    """

    def __init__(self, labels: dict[str, str]) -> None:
        from ray.util import metrics

        self._labels = {name: labels[name] for name in LABELS}
        self._gauges: dict[str, Any] = {}
        self._counters: dict[str, Any] = {}
        self._histograms: dict[str, Any] = {}
        for each in METRICS:
            keys = (*LABELS, *each.labels)
            if each.kind == "gauge":
                self._gauges[each.name] = metrics.Gauge(each.ray_name, each.help, keys)
            elif each.kind == "counter":
                self._counters[each.name] = metrics.Counter(each.ray_name, each.help, keys)
            else:
                self._histograms[each.name] = metrics.Histogram(
                    each.ray_name, each.help, list(each.buckets), keys
                )
        self._attempts = 0
        self._totals: dict[str, float] = {}
        self._events: Counter[str] = Counter()
        self._values: dict[str, float] = dict.fromkeys(_FROM_ZERO, 0.0)
        self._set_at = 0.0

    def take(self, messages: list[tuple[str, dict[str, Any], float]]) -> None:
        """Messages as they come from rank 0."""
        for kind, fields, fraction in messages:
            if kind == "step":
                self._values |= step_gauges(fields)
                self._values |= {"progress": fraction, "last_step_time": fields["time"]}
                self._count("steps", fields["step"] - bool(fields.get("skipped")))
                self._count("samples", fields["samples_seen"])
            elif kind == "pace":
                for seconds in fields["step_seconds"]:
                    self._histograms["step_duration_seconds"].observe(seconds, self._labels)
                self._values["skipped_steps"] += fields["skipped"]
            elif kind == "evaluation":
                parts = ("loss", "accuracy", "seconds")
                scores = {f"eval_{name}": fields.get(name) for name in parts}
                self._values |= {n: float(v) for n, v in scores.items() if v is not None}
            elif kind == "decision":
                self._values["decisions"] += 1
            elif kind == "started" and "workers" in fields:
                self._values["recoveries"] += float(self._attempts > 0)
                self._attempts += 1
            elif kind == "event":
                self._event(fields)
        if messages:
            self._set()

    def again(self) -> None:
        """Repeat all gauges now and then: Ray lets those go that nobody sets."""
        if time.monotonic() - self._set_at > _AGAIN_SECONDS:
            self._set()

    def _set(self) -> None:
        self._set_at = time.monotonic()
        for name, value in self._values.items():
            self._gauges[name].set(value, self._labels)
        for kind, number in self._events.items():
            self._gauges["events"].set(number, {**self._labels, "kind": kind})

    def _event(self, fields: dict[str, Any]) -> None:
        self._events[str(fields["kind"])] += 1
        self._values["recoveries"] += fields["kind"] == "lost"
        self._values["stragglers"] += fields["kind"] == "straggler"
        if fields["kind"] == "checkpoint":
            self._values["last_checkpoint_time"] = fields["time"]
            if known(fields.get("seconds")):
                self._values["checkpoint_seconds"] = fields["seconds"]

    def _count(self, name: str, total: float) -> None:
        """Raise a counter to `total`; what an attempt makes again is counted once."""
        before = self._totals.setdefault(name, 0.0)
        if known(total) and total > before:
            self._counters[name].inc(total - before, self._labels)
            self._totals[name] = total
