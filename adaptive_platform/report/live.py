"""What a person sees while a run goes on: one live line, with decisions and scores above it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from adaptive_platform.report.wording import (
    format_decision,
    format_evaluation,
    format_event,
    format_step,
)

__all__ = ["LiveLine"]

_RATE_WINDOW_SECONDS = 60.0
_REDRAW_SECONDS = 0.1


class LiveLine:
    """Shows a run on a console.

    On a terminal one line is redrawn in place; elsewhere plain lines appear at most every
    `every_seconds`. Decisions that change nothing are left to the journal.

    Args:
        console: Where to write.
        total: The whole training in words, such as `5 epochs`.
        every_seconds: Least time between two plain step lines.
        clock: Seconds since some fixed moment, never falling.
    """

    def __init__(
        self,
        console: Console,
        total: str = "",
        *,
        every_seconds: float = 15.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._total = total
        self._in_place = console.is_terminal and not console.is_dumb_terminal
        self._every = _REDRAW_SECONDS if self._in_place else every_seconds
        self._clock = clock
        self._shown_at: float | None = None
        self._held: str | None = None
        self._marks: deque[tuple[float, float]] = deque()
        self._live: Live | None = None

    def step(self, row: Mapping[str, Any], fraction_done: float) -> None:
        """Show the fields of a `StepRecord`, and the share of the training that is done."""
        now = self._clock()
        eta = self._eta_seconds(now, fraction_done)
        width = self._console.width if self._in_place else 10_000
        line = format_step(row, fraction_done, self._total, eta, width)
        if self._shown_at is not None and now - self._shown_at < self._every:
            self._held = line
            return
        self._show(line, now)

    def decision(self, row: Mapping[str, Any]) -> None:
        """Tell a decision, with the fields of a `DecisionRecord`, if it changed the batch."""
        if row["old_batch"] != row["new_batch"]:
            self._print(format_decision(row), "bold")

    def evaluation(self, row: Mapping[str, Any]) -> None:
        """Tell the scores on held-out data, with the fields of an `EvalRecord`."""
        self._print(format_evaluation(row), "green")

    def event(self, row: Mapping[str, Any]) -> None:
        """Tell what else happened, with the fields of an `EventRecord`."""
        self._print(format_event(row), "yellow" if row["kind"] == "warning" else "dim")

    def close(self) -> None:
        """Show the last step, if it was held back, and leave the console to others."""
        if self._held is not None:
            self._show(self._held, self._clock())
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _show(self, line: str, now: float) -> None:
        self._shown_at, self._held = now, None
        if not self._in_place:
            self._print(line)
            return
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        text = Text(self._printable(line), no_wrap=True, overflow="ellipsis")
        self._live.update(text, refresh=True)

    def _print(self, line: str, style: str = "") -> None:
        # Text, not markup: a reason or a path may hold square brackets.
        self._console.print(Text(self._printable(line), style=style), soft_wrap=True)

    def _printable(self, line: str) -> str:
        """The line without what the console can't encode: an arrow must not end the run."""
        encoding = self._console.encoding
        return line.encode(encoding, errors="replace").decode(encoding)

    def _eta_seconds(self, now: float, fraction_done: float) -> float | None:
        """Time left at the speed of the last minute; None until there is a speed."""
        self._marks.append((now, fraction_done))
        while len(self._marks) > 2 and now - self._marks[1][0] >= _RATE_WINDOW_SECONDS:
            self._marks.popleft()
        start, before = self._marks[0]
        if now <= start or fraction_done <= before:
            return None
        return max(0.0, 1.0 - fraction_done) * (now - start) / (fraction_done - before)
