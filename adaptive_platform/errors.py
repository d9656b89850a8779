"""Errors that are the user's to mend: said in one sentence, shown without a traceback."""

from __future__ import annotations

__all__ = ["CheckpointError", "DataError", "RunFailedError", "UserError"]


class UserError(ValueError):
    """The input was wrong. The message names field, value, what is allowed and the fix.

    The command line prints it and exits with code 2.
    """


class DataError(UserError):
    """A data source can't be used as asked: missing, empty, or too many broken samples."""


class CheckpointError(UserError):
    """A checkpoint can't be used here: damaged, foreign, or made for other parameters."""


class RunFailedError(RuntimeError):
    """Training started and could not go on. The message names the cause; exit code 1."""
