"""Which of Ray Train's helpers a run starts."""

from __future__ import annotations

import pytest
from ray._private import services
from ray.train import ScalingConfig

from adaptive_platform.cluster.backend import AdaptiveBackendConfig, LeanTrainer
from adaptive_platform.cluster.entry import run_job


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
