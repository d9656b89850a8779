"""`bench chaos`: every scenario bounded in time and kept as a line of a file, all as one table."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from adaptive_platform.bench.hosts import clear_hosts
from adaptive_platform.bench.invariants import TIMEOUT_SECONDS
from adaptive_platform.bench.judging import Finding
from adaptive_platform.bench.rows import Row
from adaptive_platform.bench.scenarios import scenario_of, scenarios
from adaptive_platform.bench.stage import adopt_orphans, end_descendants
from adaptive_platform.errors import UserError

__all__ = ["chaos", "rows_of", "table"]

_START_SECONDS = 60.0
"""For the nodes of a stage, beside the scenario's own time."""
_QUICK = ("kill",)


def chaos(
    *,
    quick: bool = False,
    cases: Sequence[str] = (),
    soak_minutes: float = 0.0,
    seed: int = 0,
    out: str = "",
    say: Callable[[str], None] = lambda text: None,
) -> list[Finding]:
    """Play scenarios one after the other, each within its time, whatever becomes of the others.

    Args:
        quick: The first one only.
        cases: Names of those to play; all where there are none.
        soak_minutes: Random trouble for so long instead; 0 for none.
        seed: Of random trouble.
        out: Folder of `elasticity.jsonl` and `elasticity.md`. Scenarios that are in it as expected
            are not played again unless named. Nothing is kept where empty.
        say: Hears how it goes.

    Returns:
        All of them in the order of the table, those from earlier included.

    Raises:
        UserError: There is no such scenario.
    """
    known = [scenario.name for scenario in scenarios()]
    for name in cases:
        if name not in known:
            raise UserError(f"--case = {name}: must be one of {', '.join(known)}.")
    kept = Path(out, "elasticity.jsonl") if out else None
    found = {finding.name: finding for finding in _read(kept)}
    names = list(cases) or (list(_QUICK) if quick else known)
    if soak_minutes:
        names = [f"soak:{soak_minutes:g}:{seed}"]
    elif not cases:
        names = [n for n in names if n not in found or not found[n].as_expected]
    adopt_orphans()
    player = _Player()
    try:
        for name in names:
            finding = player.play(name)
            found[finding.name] = finding
            say(f"{finding.name}: {finding.verdict} ({finding.seconds:.0f} s)")
            for line in finding.told:
                say(f"  {line}")
            if kept is not None:
                _write(kept, found, known)
    finally:
        player.end()
    return [found[name] for name in (*known, "soak") if name in found]


class _Player:
    """A process that plays scenarios, and is ended with all it started when one takes too long."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def play(self, name: str) -> Finding:
        """One scenario."""
        scenario = scenario_of(name)
        seconds = scenario.limit_seconds + _START_SECONDS
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "adaptive_platform.bench.playing"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=_environment(),
            )
        began = time.monotonic()
        verdict = "the process that plays ended"
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(f"{name}\n")
            self._process.stdin.flush()
            content = self._answer(seconds)
        except TimeoutError:
            content, verdict = None, f"not over within {seconds:.0f} s"
        except (BrokenPipeError, EOFError):
            content = None
        if content is None:
            self.end()
            content = {
                "name": scenario.name,
                "event": scenario.event,
                "expected": scenario.expected,
                "verdict": f"failed: {verdict}",
                "seconds": round(time.monotonic() - began, 1),
            }
        elif content.pop("broken", False):
            self.end()  # whatever is left of that run must not disturb the next one
        return Finding(**content | {"told": tuple(content.get("told", ()))})

    def _answer(self, seconds: float) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        deadline = time.monotonic() + seconds
        buffer = b""
        output = self._process.stdout.fileno()
        while True:
            ready, _, _ = select.select([output], [], [], max(deadline - time.monotonic(), 0.0))
            if not ready:
                raise TimeoutError
            more = os.read(output, 65536)
            if not more:
                raise EOFError
            buffer += more
            *lines, buffer = buffer.split(b"\n")
            for line in lines:
                if line.startswith(b"finding "):
                    found: dict[str, Any] = json.loads(line.removeprefix(b"finding "))
                    return found

    def end(self) -> None:
        """The process and everything below it."""
        if self._process is not None:
            end_descendants()
            self._process.wait()
            clear_hosts()
            self._process = None


def _environment() -> dict[str, str]:
    # As a run on its own machine has it; see `cluster.ray_session`.
    return os.environ | {
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
        "OMP_NUM_THREADS": "1",
    }


def _read(path: Path | None) -> list[Finding]:
    if path is None or not path.exists():
        return []
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [Finding(**line | {"told": tuple(line["told"])}) for line in lines]


def _write(path: Path, found: dict[str, Finding], known: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    ordered = [found[name] for name in (*known, "soak") if name in found]
    lines = [json.dumps(asdict(finding)) for finding in ordered]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(table(ordered), encoding="utf-8")


_HEADER = (
    "event",
    "expected",
    "longest gap between steps",
    "all workers back",
    "steps repeated",
    "samples lost / repeated",
    "weights alike",
    "stray processes",
    "verdict",
)


def table(found: Sequence[Finding]) -> str:
    """All of them as a page."""
    rows = [_HEADER, ("---",) * len(_HEADER), *map(_cells, found)]
    lines = [
        "# Runs in trouble",
        "",
        "    adaptive-platform bench chaos --out experiments/studies",
        "",
        "Three workers (four where a node is killed during a resize) on two Ray nodes of two CPUs",
        f"on one machine with {os.cpu_count()} CPUs; a step takes 30 ms and the sums, and",
        f"`reducer.timeout_seconds` is {TIMEOUT_SECONDS}. Each run is held against a calm one of a",
        "single worker: the samples of each step, and the weights at the end. A checksum of the",
        "weights on every worker before every pass says whether they are alike to the bit. The",
        "command above plays what is not in the table as expected.",
        "",
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
    ]
    return "\n".join(lines)


def _cells(finding: Finding) -> tuple[str, ...]:
    if finding.weights_alike is None:
        return (finding.event, finding.expected, *("",) * 6, finding.verdict)
    full = finding.full_seconds
    verdict = finding.verdict
    if finding.told_after is not None:
        verdict += f"; told after {finding.told_after} steps"
    event = finding.event
    if finding.name == "soak":
        event += f", {finding.events} events in {finding.steps} steps"
    return (
        event,
        finding.expected,
        f"{finding.gap_seconds:.2f} s",
        "" if full is None else f"{full:.1f} s",
        str(finding.steps_repeated),
        f"{finding.samples_lost} / {finding.samples_repeated}",
        "yes" if finding.weights_alike else "no",
        str(finding.strays),
        verdict,
    )


def rows_of(found: Sequence[Finding]) -> list[Row]:
    """Times, as other benchmarks print them; the baseline is what is allowed."""
    rows = []
    for finding in found:
        scenario = scenario_of(finding.name) if finding.name != "soak" else None
        times = [("longest gap between steps", finding.gap_seconds, "gap_seconds")]
        times.append(("all workers back", finding.full_seconds, "full_seconds"))
        for words, value, bound in times:
            allowed = getattr(scenario, bound) if scenario is not None else None
            if value is not None:
                rows.append(
                    Row(
                        bench="chaos",
                        case=f"{finding.name}: {words}",
                        value=value,
                        unit="s",
                        baseline=allowed,
                        ratio=value / allowed if allowed else None,
                        repeats=1,
                    )
                )
    return rows
