from __future__ import annotations

import pytest

from adaptive_platform.controllers import Decision, Limits, Observation
from adaptive_platform.controllers.gsnr import GsnrConfig
from adaptive_platform.progress import Progress
from adaptive_platform.summary import GradientSummary


def decide(gsnr: float | None, *, target: float = 1.0, batch: int = 32) -> Decision:
    controller = GsnrConfig(global_batch=batch, target_gsnr=target).build()
    return controller.decide(
        Observation(
            progress=Progress(dataset_size=1000, samples=10_000),
            summary=GradientSummary(gsnr=gsnr, observations=100),
            global_batch=batch,
            limits=Limits(dataset_size=1000),
        )
    )


def test_the_batch_brings_the_layers_to_the_target() -> None:
    decision = decide(0.02)
    assert decision.global_batch == 50
    assert decision.global_batch * 0.02 == pytest.approx(1.0)
    assert decision.inputs["gsnr"] == pytest.approx(0.64)
    assert decide(0.02, target=0.5).global_batch == 25


@pytest.mark.parametrize("gsnr", [None, 0.0, -1.0])
def test_it_holds_without_a_signal(gsnr: float | None) -> None:
    decision = decide(gsnr)
    assert not decision.changed
    assert "hold" in decision.reason


def test_a_vanishing_signal_asks_for_no_more_than_one_growth() -> None:
    assert decide(1e-320).global_batch == 64
