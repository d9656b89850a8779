"""The function that Ray Train ships to its workers; importing it costs its controller nothing."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

__all__ = ["run_job"]


def run_job(config: Mapping[str, Any]) -> None:
    """Unpack the job and train; torch is imported here, on the workers, at the earliest."""
    entered = time.time()
    from ray import cloudpickle

    from adaptive_platform.cluster.worker import train_worker

    train_worker(cloudpickle.loads(config["job"]), entered)
