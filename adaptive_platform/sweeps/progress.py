"""What people see of a sweep: lines as trials begin and end, and on a terminal a live table."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from ray.tune import Callback
from rich.console import Console
from rich.live import Live
from rich.table import Table

from adaptive_platform.report.wording import count, duration, number, percent
from adaptive_platform.sweeps.results import TrialRow, best_of, row_of

__all__ = ["Progress", "told"]

_REFRESH_SECONDS = 1.0
_WAIT_SECONDS = 30.0
_MOST_ROWS = 20
_GONE = (OSError, UnicodeError, ValueError, SystemExit)
"""What a terminal raises that is closed, or can't show a character; Rich exits on a closed pipe."""


class Progress(Callback):
    """Watches Tune.

    Args:
        console: Where people read; None for silence.
        sweep_dir: The sweep's directory.
        metric: What trials are compared by.
        total: Trials in all, where that is known.
        free: Asks the cluster for free CPUs, and says how many a trial needs, as a sentence where
            they do not suffice; empty where they do.
    """

    def __init__(
        self,
        console: Console | None,
        sweep_dir: str,
        metric: str,
        total: int | None,
        free: Callable[[], str],
    ) -> None:
        self._console = console
        self._dir = sweep_dir
        self._metric = metric
        self._total = total
        self._free = free
        self._begun = time.monotonic()
        self._drawn_at = 0.0
        self._started: dict[str, float] = {}
        self._warned = False
        self._live: Live | None = None
        if console is not None and console.is_terminal:
            self._live = Live(console=console, auto_refresh=False, transient=True)
            self._live.start()

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Tune gave the trial a process."""
        self._started.setdefault(trial.trial_id, time.monotonic())
        row = row_of(trial, self._dir)
        self._say(f"trial {row.trial} begins: {told(row.fields)}")

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """The trial ended, or was stopped by the scheduler."""
        row = row_of(trial, self._dir)
        how = "done" if row.status == "done" else f"stopped early at {row.percent:.0f} %"
        self._say(f"trial {row.trial} {how}: {self._scores(row)} in {duration(row.seconds)}")

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """The trial failed; the sweep goes on."""
        row = row_of(trial, self._dir)
        self._say(f"trial {row.trial} failed: {row.message or 'see its directory'}")

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        """Tune went once around its loop."""
        now = time.monotonic()
        if now - self._drawn_at < _REFRESH_SECONDS:
            return
        self._drawn_at = now
        self._warn_of_waiting(trials, now)
        if self._live is not None:
            with suppress(*_GONE):
                self._live.update(self._table(trials), refresh=True)

    def close(self) -> None:
        """End the live table."""
        if self._live is not None:
            with suppress(*_GONE):
                self._live.stop()
            self._live = None

    @property
    def seconds(self) -> float:
        """Since the sweep's Ray was there."""
        return time.monotonic() - self._begun

    def say(self, line: str) -> None:
        """A line of the driver's own."""
        self._say(line)

    def _warn_of_waiting(self, trials: list[Any], now: float) -> None:
        silent = [
            trial
            for trial in trials
            if trial.status == "RUNNING"
            and not trial.last_result
            and now - self._started.get(trial.trial_id, now) > _WAIT_SECONDS
        ]
        if not silent or self._warned:
            return
        lack = self._free()
        if lack:
            self._warned = True
            self._say(f"{len(silent)} trial(s) wait for resources: {lack}")

    def _say(self, line: str) -> None:
        if self._console is not None:
            with suppress(*_GONE):
                self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _scores(self, row: TrialRow) -> str:
        parts = [
            f"accuracy {percent(row.accuracy)}" if row.accuracy is not None else "",
            f"loss {number(row.loss)}" if row.loss is not None else "no score",
        ]
        return ", ".join(filter(None, parts))

    def _table(self, trials: list[Any]) -> Table:
        rows = [row_of(trial, self._dir) for trial in trials]
        best = best_of(rows, self._metric)
        ended = sum(row.status in ("done", "stopped early", "failed") for row in rows)
        of = "" if self._total is None else f" of {self._total}"
        title = f"{ended}{of} trials ended, {duration(time.monotonic() - self._begun)}"
        table = Table(title=title, box=None, title_justify="left", pad_edge=False)
        for head in ("trial", "status", "run", "accuracy", "loss", "step", "batch", "fields"):
            table.add_column(head, no_wrap=True, overflow="ellipsis")
        active = [row for row in rows if row.status == "running"]
        others = [row for row in rows if row.status != "running" and row.status != "waiting"]
        others.sort(key=lambda row: row is not best)
        for row in [*active, *others][:_MOST_ROWS]:
            mark = "*" if best is not None and row.trial == best.trial else ""
            table.add_row(
                row.trial + mark,
                row.status,
                f"{row.percent:.0f} %",
                percent(row.accuracy),
                number(row.loss),
                count(row.step),
                count(row.batch),
                told(row.fields),
            )
        return table


def told(fields: Mapping[str, Any]) -> str:
    """Drawn fields in one line."""
    parts = []
    for name, value in fields.items():
        text = number(value) if isinstance(value, float) else str(value)
        parts.append(f"{name}={text}")
    return " ".join(parts)
