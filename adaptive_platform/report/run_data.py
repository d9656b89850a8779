"""Read a run directory back: recipe, tables and result, also of a run that is still going on."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from adaptive_platform.errors import UserError
from adaptive_platform.report.environment import ENVIRONMENT_NAME
from adaptive_platform.report.journal import TABLES
from adaptive_platform.report.parts import arrow_schema, read_table
from adaptive_platform.report.result import RESULT_NAME
from adaptive_platform.storage import join, open_location, read_bytes

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["RECIPE_NAME", "RunData", "empty_frame", "labels", "read_run"]

RECIPE_NAME = "recipe.yaml"


def empty_frame(table: str) -> pd.DataFrame:
    """A frame without rows and with the columns of a table of `TABLES`."""
    frame: pd.DataFrame = arrow_schema(TABLES[table]).empty_table().to_pandas()
    return frame


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """What is known about one run. Tables may be empty, and the result missing, while it runs."""

    path: str
    """The run directory, as it was given."""
    recipe: dict[str, Any] = field(default_factory=dict)
    """The resolved recipe; empty where there is none."""
    recipe_text: str = ""
    """`recipe.yaml` as it stands there."""
    steps: pd.DataFrame = field(default_factory=lambda: empty_frame("steps"))
    """Columns of `StepRecord`, in the order in which the steps were taken."""
    decisions: pd.DataFrame = field(default_factory=lambda: empty_frame("decisions"))
    """Columns of `DecisionRecord`; one row per step and kind."""
    evals: pd.DataFrame = field(default_factory=lambda: empty_frame("evals"))
    """Columns of `EvalRecord`; one row per step, the newest."""
    events: pd.DataFrame = field(default_factory=lambda: empty_frame("events"))
    """Columns of `EventRecord`, by time, of all attempts."""
    result: dict[str, Any] | None = None
    """`result.json`, with the fields of `RunResult`; None while the run has not ended."""

    environment: dict[str, Any] = field(default_factory=dict)
    """`environment.json` of the newest attempt; empty where there is none."""

    @property
    def name(self) -> str:
        """Last part of the path: what people call the run."""
        return os.path.basename(os.path.normpath(self.path)) or self.path


def read_run(run_dir: str | os.PathLike[str]) -> RunData:
    """Read everything that a run has written so far.

    Args:
        run_dir: A local path or any URI that pyarrow knows.

    Raises:
        UserError: It isn't a run directory, or one of its files is damaged; says which and why.
    """
    given = os.fspath(run_dir)
    system, root = open_location(given)
    _refuse_other_directories(system, root, given)
    tables = {name: _frame(system, join(root, name), name, given) for name in TABLES}
    recipe_text = (read_bytes(system, join(root, RECIPE_NAME)) or b"").decode(errors="replace")
    result = read_bytes(system, join(root, RESULT_NAME))
    environment = read_bytes(system, join(root, ENVIRONMENT_NAME))
    return RunData(
        path=given,
        recipe=_recipe(recipe_text, given),
        recipe_text=recipe_text,
        steps=_each_once(tables["steps"]),
        decisions=tables["decisions"].drop_duplicates(["step", "kind"], keep="last"),
        # An evaluation at the step of a checkpoint may be repeated by the attempt after it.
        evals=tables["evals"].drop_duplicates("step", keep="last"),
        events=tables["events"].sort_values("time", kind="stable", ignore_index=True),
        result=None if result is None else _mapping(result, given, RESULT_NAME),
        environment=_mapping(environment or b"{}", given, ENVIRONMENT_NAME),
    )


def _each_once(steps: pd.DataFrame) -> pd.DataFrame:
    """A writer that woke up after another one took over may have left some of its steps too."""
    again = steps.duplicated(["step", "skipped"], keep="last") & ~steps.skipped.astype(bool)
    return steps[~again].reset_index(drop=True) if again.any() else steps


def labels(runs: list[RunData]) -> list[str]:
    """A short name for each run; those that share one get more of their path or a number."""
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        names = [os.path.normpath(run.path) for run in runs]
    return [
        name if names.count(name) == 1 else f"{name} ({names[:at].count(name) + 1})"
        for at, name in enumerate(names)
    ]


def _refuse_other_directories(system: Any, root: str, given: str) -> None:
    from pyarrow import fs

    info = system.get_file_info(root)
    if info.type == fs.FileType.NotFound:
        raise UserError(f"{given}: there is no such directory. Give the run directory (out=DIR).")
    if info.type == fs.FileType.File:
        raise UserError(f"{given} is a file. Give the run directory that holds it (out=DIR).")
    entries = {entry.base_name for entry in system.get_file_info(fs.FileSelector(root))}
    if RECIPE_NAME in entries or "steps" in entries:
        return
    inside = [
        name
        for name in sorted(entries)
        if system.get_file_info(join(join(root, name), RECIPE_NAME)).type == fs.FileType.File
    ]
    hint = f" It holds runs: {', '.join(inside[:5])}." if inside else ""
    raise UserError(
        f"{given} is not a run directory: it has neither {RECIPE_NAME} nor steps/.{hint} "
        "Give the directory that training printed at its end (out=DIR)."
    )


def _frame(system: Any, folder: str, name: str, given: str) -> pd.DataFrame:
    from pyarrow import ArrowException

    try:
        table = read_table(system, folder, arrow_schema(TABLES[name]))
    except (ArrowException, OSError) as error:
        raise UserError(
            f"{given}: the records in {name}/ can't be read ({error}). "
            "Move the damaged part out of the folder to read the others."
        ) from error
    frame: pd.DataFrame = table.to_pandas()
    return frame


def _recipe(text: str, given: str) -> dict[str, Any]:
    import yaml

    try:
        recipe = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"{given}: {RECIPE_NAME} is not valid YAML ({error}).") from error
    return recipe if isinstance(recipe, dict) else {}


def _mapping(data: bytes, given: str, name: str) -> dict[str, Any]:
    try:
        content = json.loads(data)
    except ValueError as error:
        raise UserError(f"{given}: {name} is not valid JSON ({error}).") from error
    return content if isinstance(content, dict) else {}
