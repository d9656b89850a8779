"""What the driver learns from the mailbox: shown to people as it comes, summed up at the end."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from adaptive_platform.cluster.mailbox import Message
from adaptive_platform.report.live import LiveLine
from adaptive_platform.report.records import RunResult

__all__ = ["Monitor", "cause_of"]

_PARTS = (
    ("imports", "imported"),
    ("Ray", "ray"),
    ("workers", "workers"),
    ("rendezvous", "met"),
    ("model and data", "built"),
    ("first step", "first_step"),
)
"""Parts of the start-up and the mark that ends each, in order."""


class Monitor:
    """Takes messages in.

    Args:
        console: Where people read; None for silence.
        command_time: When the command began, in seconds since 1970.
        length: Of the run, such as `4 epochs`.
    """

    def __init__(self, console: Console | None, command_time: float, length: str) -> None:
        self._live = LiveLine(console, length) if console is not None else None
        self._begun = command_time
        self._marks: dict[str, float] = {}
        self._ending: dict[str, Any] = {}
        self._decisions = 0
        self._initial_batch: int | None = None
        self._last_step: dict[str, Any] = {}
        self._interrupted = False

    @property
    def any_step(self) -> bool:
        """True when at least one step was taken."""
        return bool(self._last_step)

    def mark(self, name: str, when: float) -> None:
        """A part of the start-up ended; only the first attempt counts."""
        self._marks.setdefault(name, when)

    def take(self, messages: list[Message]) -> None:
        """Show and remember."""
        for kind, fields, fraction in messages:
            if kind == "started":
                for name, when in fields.items():
                    self.mark(name, when)
            elif kind == "batch":
                self._initial_batch = fields["initial"]
            elif kind == "failed":
                self._ending = {**fields, "status": "failed"}
            elif kind == "ended":
                self._ending = fields
            else:
                self._show(kind, fields, fraction)

    def _show(self, kind: str, fields: dict[str, Any], fraction: float) -> None:
        if kind == "step":
            self._last_step = fields
        self._decisions += kind == "decision"
        with self._audience():
            if self._live is None:
                return
            if kind == "step":
                self._live.step(fields, fraction)
            elif kind == "decision":
                self._live.decision(fields)
            elif kind == "evaluation":
                self._live.evaluation(fields)
            elif kind == "event" and fields["kind"] != "checkpoint":
                self._live.event(fields)

    @contextmanager
    def _audience(self) -> Iterator[None]:
        """A terminal that is gone or can't show a character costs the run nothing.

        Rich answers a closed pipe with SystemExit, and nothing but printing happens in here.
        """
        try:
            yield
        except (OSError, UnicodeError, SystemExit):
            self._live = None

    def write(self, console: Console, line: str) -> None:
        """A line of the summary."""
        with self._audience():
            console.print(line, highlight=False, markup=False, soft_wrap=True)

    def say(self, text: str) -> None:
        """A line of the driver's own."""
        if self._live is not None:
            step = self._last_step.get("step", 0)
            with self._audience():
                self._live.event({"kind": "note", "text": text, "time": time.time(), "step": step})

    def result(self, error: BaseException | None, signal_exit_code: int) -> RunResult:
        """How the run ended.

        Args:
            error: What Ray Train raised; None when all workers returned.
            signal_exit_code: 130 or 143 when the driver was asked to stop, else 0.
        """
        ending = dict(self._ending)
        status = ending.pop("status", "failed")
        message, code = ending.pop("message", ""), ending.pop("exit_code", 0)
        if error is not None and status == "failed" and not message:
            status, message, code = "failed", cause_of(error), 1
        elif status == "interrupted":
            code = signal_exit_code or 143
            message = "stopped as asked"
        elif status == "failed":
            code = code or 1
            message = message or "the workers ended without saying how"
        if not ending and self._last_step:
            last = self._last_step
            ending = {"steps": last["step"], "samples": last["samples_seen"]}
        return RunResult(
            status=status,
            exit_code=code,
            message=message,
            seconds=time.time() - self._begun,
            startup_seconds=self._startup(),
            decisions=self._decisions,
            initial_batch=self._initial_batch,
            **ending,
        )

    def close(self) -> None:
        """End the live line."""
        with self._audience():
            if self._live is not None:
                self._live.close()

    def _startup(self) -> dict[str, float]:
        parts, previous = {}, self._begun
        for part, mark in _PARTS:
            if mark in self._marks:
                parts[part] = max(self._marks[mark] - previous, 0.0)
                previous = max(self._marks[mark], previous)
        return parts


def cause_of(error: BaseException) -> str:
    """The innermost cause of a Ray Train failure in one line, without its stack of wrappers."""
    failures = getattr(error, "worker_failures", None)
    if failures:
        rank, inner = sorted(failures.items(), key=lambda item: _is_consequence(item[1]))[0]
        return f"worker {rank}: {_named(inner)}"
    return _named(error)


def _named(error: BaseException) -> str:
    line = _last_line(str(error))
    if not line:
        return repr(error)
    if "No module named 'adaptive_platform'" in line:
        line += " (install it on every node, or submit the run with --working-dir)"
    return (
        line if re.match(r"^[\w.]*(Error|Exception)\b", line) else f"{type(error).__name__}: {line}"
    )


def _is_consequence(error: BaseException) -> bool:
    """True for what follows from a peer's failure; named only for want of another."""
    return "CollectiveError" in str(error) or "CollectiveError" in type(error).__name__


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"^[\w.]*(Error|Exception|Interrupt)\b", line)]
    return (named or lines or [""])[-1]
