"""Which of Ray Train's helpers a run starts."""

from __future__ import annotations

import os

import pytest
from ray._private import services
from ray.train import ScalingConfig

from adaptive_platform.cluster.backend import AdaptiveBackendConfig, LeanTrainer
from adaptive_platform.cluster.entry import run_job
from adaptive_platform.cluster.ray_session import ray_session
from adaptive_platform.recipe import load_recipe


def helpers() -> set[str]:
    trainer = LeanTrainer(
        run_job,
        backend_config=AdaptiveBackendConfig(),
        scaling_config=ScalingConfig(num_workers=1),
    )
    return {type(each).__name__ for each in trainer._create_default_callbacks()}


@pytest.mark.cluster
def test_processes_without_a_use_are_not_started(shared_ray, monkeypatch):
    found = helpers()
    assert "BackendSetupCallback" in found
    assert not {"DatasetsCallback", "PlacementGroupCleanerCallback"} & found
    monkeypatch.setattr(services, "get_webui_url_from_internal_kv", lambda: "127.0.0.1:8265")
    with_dashboard = helpers()
    assert with_dashboard - found == {"PlacementGroupCleanerCallback"}


@pytest.mark.cluster
def test_a_node_that_drains_restarts_nobody_also_in_a_ray_that_was_there_before(
    shared_ray, monkeypatch
):
    for name in ("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    with ray_session(load_recipe("quickstart", ["workers=[1,2]"])):
        assert os.environ["RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"] == "0"
        assert os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] == "0.5"
