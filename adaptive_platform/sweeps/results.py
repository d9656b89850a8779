"""What a sweep found: one row per trial, as a table, a Parquet file, and the winning recipe."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adaptive_platform.errors import UserError
from adaptive_platform.report.result import RESULT_NAME
from adaptive_platform.storage import join, open_location, read_bytes
from adaptive_platform.sweeps.score import lost
from adaptive_platform.sweeps.trial import run_dir_of

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["BEST_NAME", "PAGE_NAME", "TABLE_NAME", "TrialRow", "best_of", "frame", "row_of"]

TABLE_NAME = "results.parquet"
PAGE_NAME = "sweep.html"
BEST_NAME = "best.yaml"
_ENDED = {"TERMINATED": "stopped early", "ERROR": "failed", "RUNNING": "running"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRow:
    """How one trial stands."""

    trial: str
    """Short name; also that of its run directory under `trials/`."""
    status: str
    """`done`, `stopped early` by the scheduler, `failed`, `running`, or `waiting`."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Recipe fields that were drawn for it."""
    accuracy: float | None = None
    """Held-out accuracy of the last evaluation, in [0, 1]."""
    loss: float | None = None
    """Held-out loss of the last evaluation."""
    percent: float = 0.0
    """Share of its run that lies behind it, in percent."""
    step: int = 0
    """Committed steps at the last evaluation."""
    samples: int = 0
    """Samples seen by then."""
    batch: float | None = None
    """Global batch by then."""
    lr: float | None = None
    """Learning rate by then."""
    seconds: float = 0.0
    """Wall time of its last attempt, start-up included."""
    run_dir: str = ""
    """Where its records and checkpoints lie."""
    message: str = ""
    """Why it failed, in one sentence; else empty."""

    def score(self, metric: str) -> float | None:
        """Its value of the sweep's metric; None where it has none, or a score is not finite."""
        value: float | None = getattr(self, metric)
        return None if lost({"accuracy": self.accuracy, "loss": self.loss}) else value


def row_of(trial: Any, sweep_dir: str) -> TrialRow:
    """The row of one of Tune's trials."""
    last = trial.last_result or {}
    known = {
        name: last[name]
        for name in ("accuracy", "loss", "percent", "step", "samples", "batch", "lr", "seconds")
        if last.get(name) is not None
    }
    run_dir = run_dir_of(sweep_dir, trial.trial_id)
    status = last.get("ended") or _ENDED.get(trial.status, "waiting")
    if trial.status == "ERROR":
        status = "failed"
    return TrialRow(
        trial=trial.trial_id.rsplit("_", 1)[-1],
        status=status,
        fields=dict(trial.config.get("fields", {})),
        run_dir=run_dir,
        message=_cause(trial, run_dir) if status == "failed" else "",
        **known,
    )


def _cause(trial: Any, run_dir: str) -> str:
    """The last line of what was raised; where that is gone, what the run itself wrote down."""
    path = trial.error_file
    if path and Path(path).is_file():
        lines = [line.strip() for line in Path(path).read_text().splitlines() if line.strip()]
        named = [line for line in lines if re.match(r"^[\w.]*(Error|Exception)\b", line)]
        if named or lines:
            return re.sub(r"^[\w.]*TrialFailedError: ", "", (named or lines)[-1])
    system, root = open_location(run_dir)
    told = read_bytes(system, join(root, RESULT_NAME))
    return str(json.loads(told).get("message", "")) if told else ""


def best_of(rows: Sequence[TrialRow], metric: str) -> TrialRow | None:
    """The trial with the best score of those that did not fail; None where nobody has one."""
    scored = [row for row in rows if row.score(metric) is not None and row.status != "failed"]
    sign = -1.0 if metric == "loss" else 1.0
    return max(scored, key=lambda row: sign * (row.score(metric) or 0.0), default=None)


def frame(rows: Sequence[TrialRow], metric: str) -> pd.DataFrame:
    """One row per trial, best first; drawn fields are columns named as in the space.

    Columns of fields that were not drawn for a trial hold nothing there.
    """
    import pandas as pd

    names = list(dict.fromkeys(name for row in rows for name in row.fields))
    drawn = {name: _one_type([row.fields.get(name) for row in rows]) for name in names}
    columns = [name for name in TrialRow.__slots__ if name not in ("fields", "message")]
    content = {name: [getattr(row, name) for row in rows] for name in columns}
    table = pd.DataFrame({**content, **drawn, "message": [row.message for row in rows]})
    return table.sort_values(
        metric, ascending=metric == "loss", kind="stable", na_position="last", ignore_index=True
    )


def write_table(table: pd.DataFrame, sweep_dir: str) -> str:
    """Write `results.parquet`; returns its path.

    Raises:
        UserError: It can't be written there.
    """
    system, root = open_location(sweep_dir)
    path = join(root, TABLE_NAME)
    try:
        table.to_parquet(path, filesystem=system, index=False)
    except OSError as error:
        raise UserError(f"{sweep_dir}: {TABLE_NAME} can't be written ({error}).") from error
    return join(sweep_dir, TABLE_NAME)


def _one_type(values: list[Any]) -> list[Any]:
    """Values that fit into one column: lists as JSON, and text as soon as one value is text."""
    if any(isinstance(value, (list, tuple, dict)) for value in values):
        return [None if value is None else json.dumps(value) for value in values]
    if any(isinstance(value, str) for value in values):
        return [None if value is None else str(value) for value in values]
    return values
