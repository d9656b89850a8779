"""What happened in a run, in a few sentences and key figures, and how its recipe differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from adaptive_platform.report.gains import against_first_batch
from adaptive_platform.report.run_data import RunData
from adaptive_platform.report.series import column, full_steps, time_shares
from adaptive_platform.report.wording import count, duration, known, number, percent

__all__ = ["key_figures", "recipe_differences", "sentences"]

_TIME_PARTS = {
    "compute": "computing",
    "data": "waiting for data",
    "reduce": "waiting for the reduction",
    "statistics": "statistics",
}


def key_figures(run: RunData) -> dict[str, str]:
    """Names and values of the few numbers that people ask for first."""
    figures = {
        "status": _status(run),
        "held-out accuracy": percent(_last(run, "accuracy")),
        "held-out loss": number(_last(run, "loss")),
        "epochs": number(_result(run, "epochs")),
        "steps": count(_steps(run)),
        "samples": count(_samples(run)),
        "time of the last attempt" if _resumed(run) else "time": duration(_seconds(run)),
        "samples per second": number(_throughput(run)),
        "global batch": _from_to(column(full_steps(run.steps), "global_batch")),
        "workers": _range(column(run.steps, "world_size")),
    }
    return {name: value for name, value in figures.items() if value not in ("–", "")}


def sentences(run: RunData) -> list[str]:
    """What happened, in plain text, one sentence each. Says nothing that was not recorded."""
    told = [
        _outcome(run),
        _batch_story(run),
        _saving(run),
        _worker_story(run),
        _trouble(run),
        _time_story(run),
    ]
    return [sentence for sentence in told if sentence]


def recipe_differences(runs: Sequence[RunData]) -> dict[str, list[str]]:
    """Recipe fields, with dots, that are not the same in all runs, and each run's value.

    `name` and `out` always differ and say nothing, so they are left out.
    """
    flat = [_flatten(run.recipe) for run in runs]
    names = sorted({name for recipe in flat for name in recipe} - {"name", "out"})
    rows = {name: [recipe.get(name, "–") for recipe in flat] for name in names}
    return {name: row for name, row in rows.items() if len(set(row)) > 1}


def _outcome(run: RunData) -> str:
    ended = {
        "done": "The run ended",
        "interrupted": "The run was interrupted",
        "failed": "The run failed",
    }
    status = str((run.result or {}).get("status", ""))
    begin = ended.get(status, "The run is still going on, or was killed,")
    trained = f"after {count(_steps(run))} steps and {count(_samples(run))} samples"
    took = _time_taken(run)
    accuracy, loss = _last(run, "accuracy"), _last(run, "loss")
    scores = [
        f"{percent(accuracy)} held-out accuracy" if known(accuracy) else "",
        f"a held-out loss of {number(loss)}" if known(loss) else "",
    ]
    reached = " and ".join(filter(None, scores))
    message = str((run.result or {}).get("message") or "")
    cause = f" {_sentence(message)}" if status in ("failed", "interrupted") and message else ""
    return f"{begin} {trained}{took}{', at ' + reached if reached else ''}.{cause}"


def _time_taken(run: RunData) -> str:
    seconds = _seconds(run)
    if not known(seconds):
        return ""
    if _resumed(run):
        return f" over several attempts (the last took {duration(seconds)})"
    return f" in {duration(seconds)}"


def _batch_story(run: RunData) -> str:
    batch, lr = (column(full_steps(run.steps), name) for name in ("global_batch", "lr"))
    batch, lr = batch[np.isfinite(batch)], lr[np.isfinite(lr)]
    if not len(batch):
        return ""
    old, new = column(run.decisions, "old_batch"), column(run.decisions, "new_batch")
    grown, shrunk = int((new > old).sum()), int((new < old).sum())
    if grown or shrunk:
        changes = [
            f"raised {_times(grown)}" if grown else "",
            f"lowered {_times(shrunk)}" if shrunk else "",
        ]
        story = (
            f"The batch was {' and '.join(filter(None, changes))} by the controller: "
            f"it began at {count(batch[0])}, ended at {count(batch[-1])}"
            f"{_widest(batch)}"
        )
    else:
        story = (
            f"The batch stayed at {count(batch[0])}"
            if batch.min() == batch.max()
            else (f"The batch moved between {count(batch.min())} and {count(batch.max())}")
        )
    if len(lr):
        story += f", and the learning rate moved between {number(lr.min())} and {number(lr.max())}"
    return story + "."


def _saving(run: RunData) -> str:
    cost = against_first_batch(run)
    if cost is None:
        return ""
    seconds = f" and {_compared(cost.seconds, 'time')}" if known(cost.seconds) else ""
    return (
        "Against staying at its first batch, the same progress took "
        f"{_compared(cost.steps, 'steps')}, {_compared(cost.samples, 'samples')}{seconds}, "
        "by the noise measured on the way."
    )


def _compared(factor: float, what: str) -> str:
    few = {"steps": "fewer", "samples": "fewer", "time": "less"}[what]
    return f"{percent(abs(factor - 1.0))} {few if factor < 1.0 else 'more'} {what}"


def _widest(batch: Any) -> str:
    inside = max(batch[0], batch[-1])
    return f" and was {count(batch.max())} at most" if batch.max() > inside else ""


def _worker_story(run: RunData) -> str:
    world = column(run.steps, "world_size")
    world = world[np.isfinite(world)]
    if not len(world):
        return ""
    if world.min() == world.max():
        return f"{_plural(world[0], 'worker')} took part throughout."
    changes = int((world[1:] != world[:-1]).sum())
    return (
        f"Between {count(world.min())} and {count(world.max())} workers took part; "
        f"their number changed {_times(changes)}."
    )


def _trouble(run: RunData) -> str:
    skipped = int(np.nansum(column(run.steps, "skipped")))
    broken = (run.result or {}).get("broken_samples") or 0
    told = [
        f"{_plural(skipped, 'step')} {_was(skipped)} skipped" if skipped else "",
        f"{_plural(broken, 'broken sample')} {_was(broken)} left out" if broken else "",
    ]
    story = " and ".join(filter(None, told))
    return f"{story}." if story else ""


def _time_story(run: RunData) -> str:
    rate = _throughput(run)
    if not known(rate):
        return ""
    shares = time_shares(run.steps)
    split = ", ".join(f"{percent(shares[part])} {told}" for part, told in _TIME_PARTS.items())
    return f"Training ran at {number(rate)} samples per second; the time went to: {split}."


def _status(run: RunData) -> str:
    return str((run.result or {}).get("status", "running or killed"))


def _result(run: RunData, name: str) -> Any:
    return (run.result or {}).get(name)


def _last(run: RunData, name: str) -> Any:
    values = column(run.evals, name)
    values = values[np.isfinite(values)]
    return float(values[-1]) if len(values) else _result(run, name)


def _steps(run: RunData) -> float:
    recorded = column(run.steps, "step")[column(run.steps, "skipped") != 1.0]
    return float(recorded.max()) if len(recorded) else float(_result(run, "steps") or 0)


def _samples(run: RunData) -> float:
    seen = column(run.steps, "samples_seen")
    return float(seen[-1]) if len(seen) else float(_result(run, "samples") or 0)


def _seconds(run: RunData) -> float | None:
    """Wall time of the result, else from the first record to the last."""
    told = _result(run, "seconds")
    if known(told) and told > 0:
        return float(told)
    times = column(run.steps, "time")
    return float(times[-1] - times[0]) if len(times) > 1 else None


def _resumed(run: RunData) -> bool:
    """True where the records go back further than the attempt that wrote the result."""
    times, told = column(run.steps, "time"), _result(run, "seconds")
    return len(times) > 1 and known(told) and 0 < told < float(times[-1] - times[0])


def _throughput(run: RunData) -> float | None:
    """All samples over all step time: the mean over time, not over steps."""
    batch, seconds = column(run.steps, "global_batch"), column(run.steps, "step_seconds")
    total = float(np.nansum(seconds))
    return float(np.nansum(batch)) / total if total > 0 else None


def _from_to(values: Any) -> str:
    values = values[np.isfinite(values)]
    if not len(values):
        return "–"
    if values[0] == values[-1]:
        return count(values[0])
    return f"{count(values[0])} → {count(values[-1])}"


def _range(values: Any) -> str:
    values = values[np.isfinite(values)]
    if not len(values):
        return "–"
    low, high = values.min(), values.max()
    return count(low) if low == high else f"{count(low)} – {count(high)}"


def _flatten(value: Any, prefix: str = "") -> dict[str, str]:
    if not isinstance(value, Mapping):
        return {prefix: str(value)}
    flat: dict[str, str] = {}
    for name, item in value.items():
        flat |= _flatten(item, f"{prefix}.{name}" if prefix else str(name))
    return flat


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")


def _plural(value: float, word: str) -> str:
    return f"{count(value)} {word}" + ("" if value == 1 else "s")


def _times(value: int) -> str:
    return "once" if value == 1 else "twice" if value == 2 else f"{count(value)} times"


def _was(value: int) -> str:
    return "was" if value == 1 else "were"
