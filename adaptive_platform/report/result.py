"""`result.json`: how a run ended, written once at the end and replaced by a resumed attempt."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict
from typing import Any

from adaptive_platform.report.records import RunResult
from adaptive_platform.storage import join, open_location, write_bytes

__all__ = ["RESULT_NAME", "write_result"]

RESULT_NAME = "result.json"


def write_result(run_dir: str | os.PathLike[str], result: RunResult) -> None:
    """Write `result.json` whole or not at all; numbers that are not finite become null.

    Raises:
        OSError: The storage refused; an earlier `result.json` is as it was.
    """
    system, root = open_location(run_dir)
    system.create_dir(root, recursive=True)
    text = json.dumps(_finite(asdict(result)), indent=2, allow_nan=False) + "\n"
    write_bytes(system, join(root, RESULT_NAME), text.encode())


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
