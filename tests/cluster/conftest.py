"""One small Ray for all tests of a file that can share it; no other file finds it still there."""

from __future__ import annotations

import os

import pytest
import ray


@pytest.fixture(scope="module")
def shared_ray():
    """A local Ray of 4 CPUs; runs inside this process join it."""
    os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "0.5"
    os.environ["RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"] = "0"
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=128 * 2**20,
    )
    yield ray
    ray.shutdown()
