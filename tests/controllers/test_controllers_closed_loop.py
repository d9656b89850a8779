"""Estimator and controller together, on simulated gradients whose noise scale is known."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import pytest

from adaptive_platform.controllers import ControllerConfig, Limits, Observation
from adaptive_platform.controllers.gsnr import GsnrConfig
from adaptive_platform.controllers.lr_rules import AdaScaleConfig
from adaptive_platform.controllers.noise_scale import NoiseScaleConfig
from adaptive_platform.progress import Progress
from adaptive_platform.statistics import StatisticsConfig, StepMoments

SIZE, LAYERS = 500, 5
"""Elements of the simulated gradient, and the layers that they are in."""


@dataclass
class Loop:
    """A run whose true noise scale is the same in every layer and changes when told."""

    config: ControllerConfig
    seed: int
    limits: Limits
    noise_scale: float
    trouble: bool = False
    batches: list[int] = field(default_factory=list)
    factors: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.estimator = StatisticsConfig(half_life_samples=20_000).build()
        self.controller = self.config.build()
        self.batch = self.config.start(self.limits).global_batch
        self.progress = Progress(dataset_size=self.limits.dataset_size)

    def moments(self, batch: int, world_size: int) -> StepMoments:
        count = min(2 * world_size, batch)
        sizes = [batch // count + (n < batch % count) for n in range(count)]
        signal = np.full(SIZE, 1 / math.sqrt(SIZE))
        spread = math.sqrt(self.noise_scale / SIZE)
        micro = [signal + spread / math.sqrt(b) * self.rng.standard_normal(SIZE) for b in sizes]
        whole = np.average(micro, axis=0, weights=sizes)
        layered = [(g**2).reshape(LAYERS, -1).sum(1) for g in (*micro, whole)]
        means = np.mean(layered[:-1], axis=0)
        return StepMoments(
            micro_sqnorm=float(means.sum()),
            inverse_microbatch=float(np.mean([1 / b for b in sizes])),
            num_microbatches=count,
            global_sqnorm=float(layered[-1].sum()),
            global_batch=batch,
            layer_micro_sqnorms=means.tolist(),
            layer_global_sqnorms=layered[-1].tolist(),
        )

    def run(self, samples: int) -> None:
        """Train on that many samples; a troubled run resizes, skips steps and meets NaN."""
        end = self.progress.samples + samples
        while self.progress.samples < end:
            taken = min(self.batch, self.limits.dataset_size - self.progress.cursor)
            if self.trouble and self.rng.random() < 0.1:
                self.progress = self.progress.skipped(taken)
                continue
            world = int(self.rng.integers(1, 5)) if self.trouble else 2
            step = self.moments(taken, world)
            if self.trouble and self.rng.random() < 0.1:
                step = StepMoments(
                    micro_sqnorm=math.nan,
                    inverse_microbatch=step.inverse_microbatch,
                    num_microbatches=step.num_microbatches,
                    global_sqnorm=math.inf,
                    global_batch=taken,
                )
            self.estimator.update(step)
            summary = self.estimator.summary()
            self.progress = self.progress.committed(taken, taken, summary.gain(taken, 16))
            self.factors.append(AdaScaleConfig().factor(taken, 16, summary, self.progress))
            decision = self.controller.decide(
                Observation(
                    progress=self.progress,
                    summary=summary,
                    global_batch=self.batch,
                    limits=Limits(
                        dataset_size=self.limits.dataset_size,
                        world_size=world,
                        max_batch=self.limits.max_batch,
                    ),
                )
            )
            self.batch = decision.global_batch
            self.batches.append(self.batch)


CONFIGS = [NoiseScaleConfig(global_batch=16), GsnrConfig(global_batch=16)]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)
@pytest.mark.parametrize("trouble", [False, True], ids=["calm", "trouble"])
@pytest.mark.parametrize("seed", range(3))
def test_the_batch_settles_at_the_noise_scale_and_follows_it(
    config: ControllerConfig, trouble: bool, seed: int
) -> None:
    loop = Loop(config, seed, Limits(dataset_size=20_000), noise_scale=300.0, trouble=trouble)
    loop.run(100_000)
    assert loop.batch == pytest.approx(300, rel=0.2)
    settled = len(loop.batches)
    loop.run(50_000)
    assert len(set(loop.batches[settled:])) <= 2
    loop.noise_scale = 1200.0
    loop.run(300_000)
    assert loop.batch == pytest.approx(1200, rel=0.2)
    ups = sum(b > a for a, b in zip(loop.batches, loop.batches[1:], strict=False))
    downs = sum(b < a for a, b in zip(loop.batches, loop.batches[1:], strict=False))
    assert downs <= 1
    assert ups <= 12


@pytest.mark.parametrize("seed", range(3))
def test_limits_and_rates_hold_all_the_way(seed: int) -> None:
    limits = Limits(dataset_size=5000, max_batch=200)
    loop = Loop(NoiseScaleConfig(global_batch=16), seed, limits, noise_scale=5000.0, trouble=True)
    loop.run(30_000)
    assert max(loop.batches) == 200
    assert all(1 <= batch <= 200 for batch in loop.batches)
    assert all(math.isfinite(factor) and factor >= 0 for factor in loop.factors)
    true = (5000 / 16 + 1) / (5000 / 200 + 1)
    assert loop.factors[-1] == pytest.approx(true, rel=0.2)
