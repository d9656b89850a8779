from __future__ import annotations

from dataclasses import replace

import pytest

from adaptive_platform.controllers import ControllerConfig, Limits
from adaptive_platform.controllers.fixed import FixedConfig
from adaptive_platform.controllers.noise_scale import NoiseScaleConfig
from adaptive_platform.controllers.replay import Recorded, replay
from adaptive_platform.settings import variants_of
from adaptive_platform.summary import GradientSummary, ThroughputModel

LIMITS = Limits(dataset_size=1024)
MODEL = ThroughputModel(
    alpha_grad=1.0,
    beta_grad=0.5,
    alpha_local=0.0,
    beta_local=0.0,
    alpha_node=0.0,
    beta_node=0.0,
    gamma=1.0,
)


def noise(scale: float) -> GradientSummary:
    return GradientSummary(noise_trace=scale, signal_sqnorm=1.0, observations=100)


def test_a_larger_batch_learns_as_much_in_the_steps_of_its_gain() -> None:
    recorded = [Recorded(scale_invariant_steps=float(t), summary=noise(64.0)) for t in range(99)]
    base = replay(FixedConfig(global_batch=32), recorded, learned=100, base_batch=32, limits=LIMITS)
    assert base.progress.step == 100
    assert base.seconds is None
    double = replay(
        FixedConfig(global_batch=64), recorded, learned=100, base_batch=32, limits=LIMITS
    )
    # Gain (64/32 + 1) / (64/64 + 1) = 1.5, so 100 steps become 67, and 3200 samples 4288.
    assert double.progress.step == 67
    assert double.progress.samples == 67 * 64
    assert double.batches == (64,) * 67


def test_noise_is_looked_up_by_what_was_learned() -> None:
    recorded = [
        Recorded(scale_invariant_steps=0.0, summary=noise(32.0)),
        Recorded(scale_invariant_steps=50.0, summary=noise(128.0)),
    ]
    config = NoiseScaleConfig(global_batch=32, decide_every="64 samples", max_growth=8)
    found = replay(config, recorded, learned=200, base_batch=32, limits=LIMITS)
    changes = [(at, d) for at, d in found.decisions if d.changed]
    assert [d.global_batch for _, d in changes] == [128]
    assert changes[0][0].scale_invariant_steps == pytest.approx(51, abs=2)


def test_time_is_predicted_with_the_split_that_a_step_would_have() -> None:
    recorded = [Recorded(scale_invariant_steps=0.0, summary=GradientSummary())]
    limits = replace(LIMITS, world_size=2, largest_microbatch=8)
    found = replay(
        FixedConfig(global_batch=32),
        recorded,
        learned=3,
        base_batch=32,
        limits=limits,
        throughput=MODEL,
    )
    assert found.seconds == pytest.approx(3 * 2 * (1 + 0.5 * 8))


def test_the_last_batch_of_an_epoch_is_short() -> None:
    recorded = [Recorded(scale_invariant_steps=0.0, summary=GradientSummary())]
    small = replace(LIMITS, dataset_size=50)
    found = replay(FixedConfig(global_batch=32), recorded, learned=4, base_batch=32, limits=small)
    assert found.batches == (32, 18, 32, 18)
    assert found.progress.epoch == 2


@pytest.mark.parametrize("kind", variants_of(ControllerConfig))
def test_every_controller_can_be_replayed(kind: str) -> None:
    needed = {
        "schedule": {"stages": [{"at": "1 epochs", "batch": 64}]},
        "smith": {"decays": ["1 epochs"]},
    }
    config = variants_of(ControllerConfig)[kind](global_batch=32, **needed.get(kind, {}))
    recorded = [
        Recorded(scale_invariant_steps=float(t), summary=replace(noise(100.0 + t), gsnr=0.01))
        for t in range(150)
    ]
    found = replay(config, recorded, learned=150, base_batch=32, limits=LIMITS, throughput=MODEL)
    assert found.progress.scale_invariant_steps >= 150
    assert len(found.batches) == found.progress.step <= 150
    assert found.seconds is not None
    assert found.seconds > 0


def test_an_empty_record_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        replay(FixedConfig(), [], learned=1, base_batch=1, limits=LIMITS)
