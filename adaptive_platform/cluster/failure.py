"""What Ray Train does about lost workers: nothing, as long as the others go on without them."""

from __future__ import annotations

from typing import Any

import ray
from ray.train.v2._internal.execution.failure_handling import (
    DefaultFailurePolicy,
    FailureDecision,
    FailurePolicy,
)

from adaptive_platform.cluster.roster import Verdict

__all__ = ["LiveFailurePolicy"]

_ANSWER_SECONDS = 10.0


class LiveFailurePolicy(FailurePolicy):
    """Asks the mailbox's list of workers, and Ray Train's own policy where nobody is left.

    Args:
        failure_config: Ray Train's; bounds the restarts.
        mailbox: The actor.
    """

    def __init__(self, failure_config: Any, mailbox: Any) -> None:
        super().__init__(failure_config)
        self._mailbox = mailbox
        self._restarting = DefaultFailurePolicy(failure_config)

    def make_decision(self, training_failed_error: Any) -> FailureDecision:
        """Called at each poll for as long as a worker of Ray Train is gone."""
        if not hasattr(training_failed_error, "worker_failures"):
            return self._restarting.make_decision(training_failed_error)
        try:
            answer = ray.get(self._mailbox.verdict.remote(), timeout=_ANSWER_SECONDS)
        except ray.exceptions.RayError:
            return self._restarting.make_decision(training_failed_error)
        verdict = Verdict(answer)
        if verdict is Verdict.GO_ON:
            return FailureDecision.NOOP
        if verdict is Verdict.RESTART:
            return self._restarting.make_decision(training_failed_error)
        return FailureDecision.RAISE  # over: the mailbox has said how
