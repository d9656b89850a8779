"""Numbers, records and results in words for people: pure functions from values to text."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from typing import Any

__all__ = [
    "count",
    "duration",
    "expected_and_realised",
    "format_decision",
    "format_evaluation",
    "format_event",
    "format_step",
    "known",
    "number",
    "percent",
    "summary_lines",
]

_SEPARATOR = "  "


def known(value: Any) -> bool:
    """True for a finite number."""
    return (isinstance(value, (int, float)) or hasattr(value, "__float__")) and math.isfinite(
        float(value)
    )


def number(value: Any, digits: int = 3) -> str:
    """A number in `digits` significant digits without an exponent where it can be helped."""
    if not known(value):
        return "–"
    value = float(value)
    if value == 0.0:
        return "0"
    if abs(value) >= 10_000_000 or abs(value) < 1e-5:
        return f"{value:.{digits - 1}e}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text and abs(value) >= 1000 else text


def count(value: Any) -> str:
    """A whole number with thousands separated."""
    return f"{int(value):,}" if known(value) else "–"


def percent(value: Any) -> str:
    """A share in [0, 1] as percent with one decimal."""
    return f"{100.0 * float(value):.1f} %" if known(value) else "–"


def duration(seconds: Any) -> str:
    """A time such as `4.2 s`, `3 min 05 s`, `2 h 10 min` or `3 d 04 h`."""
    if not known(seconds) or seconds < 0:
        return "–"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = whole // 60
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    hours = minutes // 60
    return f"{hours // 24} d {hours % 24:02d} h"


def format_step(
    row: Mapping[str, Any],
    fraction_done: float | None = None,
    total: str = "",
    eta_seconds: float | None = None,
    width: int = 10_000,
) -> str:
    """The live line: where the run stands after a step.

    Args:
        row: Fields of `StepRecord`; what is missing or not a number is left out.
        fraction_done: Share of the training that is done, in [0, 1].
        total: The whole training in words, such as `5 epochs`.
        eta_seconds: Time that is left.
        width: Characters that there are. The parts that matter least go first.
    """
    done = "" if not known(fraction_done) else f"{math.floor(100.0 * float(fraction_done or 0))} %"
    if done and total:
        done = f"{done} of {total}"
    accuracy = row.get("accuracy")
    noise, lr, rate = row.get("noise_scale"), row.get("lr"), row.get("samples_per_second")
    # (importance, text): 0 stays longest.
    parts = [
        (1, done),
        (5, f"epoch {int(row['epoch']) + 1}" if known(row.get("epoch")) else ""),
        (0, f"step {count(row.get('step'))}" + (" skipped" if row.get("skipped") else "")),
        (0, f"loss {number(row.get('loss'))}"),
        (4, f"acc {percent(accuracy)}" if known(accuracy) else ""),
        (2, f"batch {count(row.get('global_batch'))}"),
        (6, f"lr {number(lr)}" if known(lr) else ""),
        (7, f"noise {number(noise)}" if known(noise) else ""),
        (8, f"{number(rate)} img/s" if known(rate) else ""),
        (3, f"{duration(eta_seconds)} left" if known(eta_seconds) else ""),
    ]
    kept = [part for part in parts if part[1]]
    while len(kept) > 1 and len(_SEPARATOR.join(text for _, text in kept)) > width:
        kept.remove(max(kept, key=lambda part: part[0]))
    return _SEPARATOR.join(text for _, text in kept)[:width]


def format_decision(row: Mapping[str, Any]) -> str:
    """A decision of the batch controller, with the fields of `DecisionRecord`, as one line."""
    old, new = row["old_batch"], row["new_batch"]
    what = f"batch stays {count(new)}" if old == new else f"batch {count(old)} → {count(new)}"
    return f"step {count(row['step'])}: {what} ({_one_line(row['reason'])})"


def expected_and_realised(gain: Any, cost: str) -> str:
    """One cost of a `DecisionGain`, expected and realised, such as `0.51 → 0.55`."""
    expected, realised = getattr(gain.predicted, cost), getattr(gain.realised, cost)
    return f"{number(expected, 2)} → {number(realised, 2)}"


def format_evaluation(row: Mapping[str, Any]) -> str:
    """An evaluation, with the fields of `EvalRecord`, as one line."""
    accuracy = row.get("accuracy")
    score = f"accuracy {percent(accuracy)}, " if known(accuracy) else ""
    broken = row.get("broken") or 0
    left_out = f", {count(broken)} broken left out" if broken else ""
    samples = f" on {count(row['samples'])} samples" if row.get("samples") else ""
    seconds = f" in {duration(row['seconds'])}" if row.get("seconds") else ""
    return (
        f"step {count(row['step'])}: held-out {score}loss {number(row['loss'])}"
        f"{samples}{left_out}{seconds}"
    )


def format_event(row: Mapping[str, Any]) -> str:
    """An event, with the fields of `EventRecord`, as one line."""
    return f"step {count(row['step'])}: {row['kind'].replace('_', ' ')}: {_one_line(row['text'])}"


def summary_lines(result: Mapping[str, Any], run_dir: str) -> list[str]:
    """The last words of a run: how it ended, how good, how long, and where everything lies.

    Args:
        result: Fields of `RunResult`.
        run_dir: The run directory, as the user would type it.
    """
    status = {"done": "Done", "interrupted": "Interrupted", "failed": "Failed"}
    message = str(result.get("message") or "")
    rows = [
        ("", status.get(result["status"], result["status"]) + (f": {message}" if message else ""))
    ]
    if known(result.get("accuracy")) or known(result.get("loss")):
        scores = [
            f"accuracy {percent(result['accuracy'])}" if known(result.get("accuracy")) else "",
            f"loss {number(result['loss'])}" if known(result.get("loss")) else "",
        ]
        rows.append(("held-out", ", ".join(filter(None, scores))))
    skipped = result.get("skipped_steps") or 0
    broken = result.get("broken_samples") or 0
    rows.append(
        (
            "trained",
            f"{number(result.get('epochs'))} epochs, {count(result.get('steps'))} steps, "
            f"{count(result.get('samples'))} samples"
            + (f", {_plural(skipped, 'step')} skipped" if skipped else "")
            + (f", {_plural(broken, 'broken sample')} left out" if broken else ""),
        )
    )
    if known(result.get("final_batch")):
        rows.append(("batch", _batch_story(result)))
    rows.append(("time", _time_story(result)))
    rows += [(name, path) for name, path in {"run": run_dir, **result.get("outputs", {})}.items()]
    if result["status"] == "interrupted":
        rows.append(("go on", "adaptive-platform train " + shlex.quote(f"resume={run_dir}")))
    width = max(len(name) for name, _ in rows) + 2
    return [text if not name else f"  {name:<{width}}{text}" for name, text in rows]


def _batch_story(result: Mapping[str, Any]) -> str:
    first, last = result.get("initial_batch"), result["final_batch"]
    changes = result.get("decisions") or 0
    if not changes or first == last or not known(first):
        return f"{count(last)}" + (f" ({_plural(changes, 'change')})" if changes else "")
    return f"{count(first)} → {count(last)} in {_plural(changes, 'decision')}"


def _time_story(result: Mapping[str, Any]) -> str:
    parts = result.get("startup_seconds") or {}
    if not parts:
        return duration(result.get("seconds"))
    told = ", ".join(f"{name.replace('_', ' ')} {duration(value)}" for name, value in parts.items())
    return (
        f"{duration(result.get('seconds'))}, of which start to first step "
        f"{duration(sum(parts.values()))} ({told})"
    )


def _plural(value: int, word: str) -> str:
    return f"{count(value)} {word}" + ("" if value == 1 else "s")


def _one_line(text: Any) -> str:
    return " ".join(str(text).split())
