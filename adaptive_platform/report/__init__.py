"""Records of a run: schema, Parquet journal, live line, HTML report."""

from adaptive_platform.report.journal import Journal, JournalError
from adaptive_platform.report.records import (
    DecisionRecord,
    EvalRecord,
    EventRecord,
    RunResult,
    StepRecord,
)
from adaptive_platform.report.result import write_result

__all__ = [
    "DecisionRecord",
    "EvalRecord",
    "EventRecord",
    "Journal",
    "JournalError",
    "RunResult",
    "StepRecord",
    "write_result",
]
