"""Estimator and controller together, on simulated gradients whose noise scale is known."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptive_platform.controllers import ControllerConfig, Limits, Observation
from adaptive_platform.controllers.absa import AbsaConfig, AbsConfig
from adaptive_platform.controllers.adaptive import AdaptiveConfig
from adaptive_platform.controllers.fixed import FixedConfig
from adaptive_platform.controllers.goodput import GoodputConfig, split_of
from adaptive_platform.controllers.gsnr import GsnrConfig
from adaptive_platform.controllers.lr_rules import AdaScaleConfig
from adaptive_platform.controllers.noise_scale import NoiseScaleConfig
from adaptive_platform.controllers.schedule import ScheduleConfig
from adaptive_platform.controllers.smith import SmithConfig
from adaptive_platform.progress import Progress
from adaptive_platform.statistics import StatisticsConfig, StepMoments
from adaptive_platform.summary import GradientSummary, ThroughputModel

EXAMPLES = 15
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
    speed: ThroughputModel | None = None
    halving_epochs: float = math.inf
    """Epochs in which the Hessian's top eigenvalue halves."""
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

    def eigenvalue(self) -> float:
        return 100.0 * 0.5 ** (self.progress.epochs / self.halving_epochs)

    def turns(self, since: int = 0) -> int:
        """Changes of the batch that went against the change before."""
        ways = [
            b > a
            for a, b in zip(self.batches[since:], self.batches[since + 1 :], strict=False)
            if a != b
        ]
        return sum(one != other for one, other in pairwise(ways))

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
            summary = replace(
                self.estimator.summary(),
                hessian_top_eigenvalue=self.eigenvalue()
                * float(np.exp(0.05 * self.rng.standard_normal())),
            )
            self.progress = self.progress.committed(taken, taken, summary.gain(taken, 16))
            self.factors.append(AdaScaleConfig().factor(taken, 16, summary, self.progress))
            decision = self.controller.decide(
                Observation(
                    progress=self.progress,
                    summary=summary,
                    global_batch=self.batch,
                    limits=replace(self.limits, world_size=world),
                    throughput=self.speed,
                )
            )
            assert replace(self.limits, world_size=world).allows(decision.global_batch)
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


@settings(max_examples=EXAMPLES, deadline=None, derandomize=True)
@given(
    kind=st.sampled_from([NoiseScaleConfig, GsnrConfig]),
    noise_scale=st.floats(20.0, 3000.0),
    start=st.integers(16, 3000),
    bounds=st.tuples(st.none() | st.integers(1, 200), st.none() | st.integers(200, 5000)),
    seed=st.integers(0, 10_000),
    trouble=st.booleans(),
)
def test_in_any_scenario_it_settles_within_a_fifth_and_turns_no_more_than_once(
    kind: type[AdaptiveConfig],
    noise_scale: float,
    start: int,
    bounds: tuple[int | None, int | None],
    seed: int,
    trouble: bool,
) -> None:
    """Noise, dropped steps, resizes to 1 to 4 workers and non-finite values, all at once."""
    low, high = bounds
    limits = Limits(dataset_size=20_000, min_batch=low, max_batch=high)
    loop = Loop(kind(global_batch=start), seed, limits, noise_scale=noise_scale, trouble=trouble)
    loop.run(120_000)
    right = limits.clamp(noise_scale)[0]
    assert loop.batch == pytest.approx(right, rel=0.2)
    settled = len(loop.batches)
    loop.run(40_000)
    assert loop.batch == pytest.approx(right, rel=0.2)
    assert loop.turns() <= 2
    assert loop.turns(settled) <= 1
    assert all(math.isfinite(factor) and factor > 0.0 for factor in loop.factors)


SPEED = ThroughputModel(
    alpha_grad=0.05,
    beta_grad=0.001,
    alpha_local=0.02,
    beta_local=0.0,
    alpha_node=0.02,
    beta_node=0.0,
    gamma=2.0,
)


def goodput(batch: int, noise_scale: float, limits: Limits) -> float:
    truth = GradientSummary(noise_trace=noise_scale, signal_sqnorm=1.0, observations=1)
    seconds = SPEED.step_seconds(2, 1, *split_of(batch, limits))
    return batch / seconds * truth.efficiency(batch, 16)


@settings(max_examples=EXAMPLES // 3, deadline=None, derandomize=True)
@given(noise_scale=st.floats(50.0, 2000.0), seed=st.integers(0, 10_000), trouble=st.booleans())
def test_goodput_settles_where_no_batch_is_worth_the_change(
    noise_scale: float, seed: int, trouble: bool
) -> None:
    """Its threshold is 5 %; what noise in the estimate costs comes on top."""
    limits = Limits(dataset_size=20_000, world_size=2, max_batch=4000)
    config = GoodputConfig(global_batch=16)
    loop = Loop(config, seed, limits, noise_scale=noise_scale, trouble=trouble, speed=SPEED)
    loop.run(200_000)
    best = max(goodput(batch, noise_scale, limits) for batch in range(16, 4001, 4))
    assert goodput(loop.batch, noise_scale, limits) > 0.9 * best
    settled = len(loop.batches)
    loop.run(60_000)
    assert loop.turns(settled) <= 1


@pytest.mark.parametrize(
    ("config", "last"),
    [
        (FixedConfig(global_batch=64), 64),
        (
            ScheduleConfig(
                global_batch=16,
                stages=[{"at": "2 epochs", "batch": 64}, {"at": "4 epochs", "batch": 256}],
            ),
            256,
        ),
        (SmithConfig(global_batch=16, factor=4.0, decays=["2 epochs", "5 epochs"]), 256),
        (AbsConfig(global_batch=16, max_ratio=16), 256),
        (AbsaConfig(global_batch=16, max_ratio=16), 256),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
@pytest.mark.parametrize("trouble", [False, True], ids=["calm", "trouble"])
@pytest.mark.parametrize("seed", range(3))
def test_rules_by_progress_and_curvature_reach_their_last_batch_and_never_turn(
    config: ControllerConfig, last: int, trouble: bool, seed: int
) -> None:
    limits = Limits(dataset_size=2000)
    loop = Loop(config, seed, limits, noise_scale=300.0, trouble=trouble, halving_epochs=1.5)
    loop.run(30_000)
    assert loop.batch == last
    assert loop.turns() == 0


@pytest.mark.parametrize("kind", [AbsConfig, AbsaConfig])
def test_curvature_that_stays_grows_the_batch_by_duration_alone(
    kind: type[AbsConfig | AbsaConfig],
) -> None:
    loop = Loop(kind(global_batch=16), 0, Limits(dataset_size=1000), noise_scale=300.0)
    loop.run(25_000)
    assert loop.batch == 64  # after 10 and 20 epochs
