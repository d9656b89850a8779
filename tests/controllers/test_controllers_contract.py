"""What every controller and every learning-rate rule promises; new ones are found by themselves."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any, TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from adaptive_platform.controllers import (
    AnyController,
    AnyLrRule,
    ControllerConfig,
    Decision,
    Limits,
    LrRuleConfig,
    Observation,
)
from adaptive_platform.controllers.adaptive import AdaptiveConfig
from adaptive_platform.progress import Progress
from adaptive_platform.settings import variants_of
from adaptive_platform.summary import GradientSummary, ThroughputModel

CONTROLLERS = variants_of(ControllerConfig)
RULES = variants_of(LrRuleConfig)

NEEDED: dict[str, dict[str, Any]] = {
    "schedule": {"stages": [{"at": "100 samples", "batch": 64}], "boundaries": "step"},
    "smith": {"decays": ["100 samples", "200 samples"]},
    "legw": {"warmup_epochs": 1.0},
}
"""Fields without a default."""

EAGER = {"decide_every": "1 samples", "min_observations": 1, "hysteresis": 0.0}
"""Settings that make a controller move at every step."""


def controller_of(kind: str, **fields: Any) -> ControllerConfig:
    cls = CONTROLLERS[kind]
    chosen = NEEDED.get(kind, {}) | fields
    return cls(**{k: v for k, v in chosen.items() if k in cls.model_fields})


numbers = st.one_of(st.none(), st.floats(-1e30, 1e30), st.sampled_from([0.0, 1e-300, 1e300]))
summaries = st.builds(
    GradientSummary,
    noise_trace=numbers,
    signal_sqnorm=numbers,
    observations=st.integers(0, 100),
    biased=st.booleans(),
    gsnr=numbers,
    hessian_top_eigenvalue=numbers,
)


seconds = st.just(0.0) | st.floats(1e-9, 1e6)
models = st.none() | st.builds(
    ThroughputModel,
    alpha_grad=seconds,
    beta_grad=seconds,
    alpha_local=seconds,
    beta_local=seconds,
    alpha_node=seconds,
    beta_node=seconds,
    gamma=st.floats(1, 10),
)


@st.composite
def limits(draw: st.DrawFn) -> Limits:
    low = draw(st.none() | st.integers(1, 100))
    high = draw(st.none() | st.integers(low or 1, 500))
    return Limits(
        dataset_size=draw(st.integers(1, 2000)),
        world_size=draw(st.integers(1, 9)),
        smallest_microbatch=draw(st.integers(1, 4)),
        largest_microbatch=draw(st.none() | st.integers(4, 100)),
        num_nodes=draw(st.integers(1, 3)),
        min_batch=low,
        max_batch=high,
    )


Met: TypeAlias = tuple[GradientSummary, Limits, ThroughputModel | None]


@st.composite
def runs(draw: st.DrawFn) -> list[Met]:
    """What a controller meets over a run; the limits move as workers come and go."""
    return draw(st.lists(st.tuples(summaries, limits(), models), min_size=1, max_size=30))


def replay(config: ControllerConfig, run: list[Met], restart_at: int = -1) -> list[Decision]:
    controller = config.build()
    batch, epoch, cursor, samples = config.global_batch, 0, 0, 0
    decisions = []
    for step, (summary, bounds, model) in enumerate(run, start=1):
        if step == restart_at:
            state = json.loads(json.dumps(controller.state_dict()))
            controller = config.build()
            controller.load_state_dict(state)
        taken = min(batch, bounds.dataset_size)
        samples, cursor = samples + taken, cursor + taken
        if cursor >= bounds.dataset_size:
            epoch, cursor = epoch + 1, 0
        decision = controller.decide(
            Observation(
                progress=Progress(
                    dataset_size=bounds.dataset_size,
                    epoch=epoch,
                    cursor=cursor,
                    step=step,
                    samples=samples,
                    scale_invariant_steps=float(step),
                ),
                summary=summary,
                global_batch=batch,
                limits=bounds,
                throughput=model,
            )
        )
        assert math.isfinite(controller.lr_factor)
        assert controller.lr_factor >= 0
        assert 0 <= controller.adversarial_fraction <= 1
        assert decision.changed == (decision.global_batch != batch)
        batch = decision.global_batch
        decisions.append(decision)
    return decisions


@pytest.mark.parametrize("kind", CONTROLLERS)
@pytest.mark.parametrize("eager", [True, False])
@settings(max_examples=40, deadline=None)
@given(run=runs(), start=st.integers(1, 300))
def test_decisions_stay_within_the_limits(
    kind: str, eager: bool, run: list[Met], start: int
) -> None:
    decisions = replay(controller_of(kind, global_batch=start, **(EAGER if eager else {})), run)
    for decision, (_, bounds, _) in zip(decisions, run, strict=True):
        assert isinstance(decision.global_batch, int)
        assert 1 <= decision.global_batch <= bounds.dataset_size
        assert decision.global_batch <= (bounds.max_batch or math.inf)
        room = min(bounds.max_batch or math.inf, bounds.dataset_size)
        needed = max(bounds.min_batch or 1, bounds.world_size * bounds.smallest_microbatch)
        assert decision.global_batch >= min(needed, room)
        assert decision.reason
        assert "\n" not in decision.reason
        assert decision.considered or not decision.changed
        for value in decision.inputs.values():
            assert value is None or math.isfinite(value)


@pytest.mark.parametrize("kind", CONTROLLERS)
@settings(max_examples=30, deadline=None)
@given(run=runs(), start=st.integers(1, 300), restart_at=st.integers(1, 30))
def test_decisions_repeat_also_after_a_restart(
    kind: str, run: list[Met], start: int, restart_at: int
) -> None:
    config = controller_of(kind, global_batch=start, decide_every="100 samples")
    straight = replay(config, run)
    assert replay(config, run) == straight
    assert replay(config, run, restart_at) == straight


def declared(config: ControllerConfig, met: Met) -> Met:
    """What is left of an observation when only what the controller needs was measured."""
    summary, bounds, model = met
    needs = config.needs
    if not needs & {"noise", "layers"}:
        summary = replace(summary, noise_trace=None, signal_sqnorm=None, observations=0)
    if "layers" not in needs:
        summary = replace(summary, gsnr=None)
    if "hessian" not in needs:
        summary = replace(summary, hessian_top_eigenvalue=None)
    return summary, bounds, model if "throughput" in needs else None


@pytest.mark.parametrize("kind", CONTROLLERS)
@settings(max_examples=30, deadline=None)
@given(run=runs(), start=st.integers(1, 300))
def test_controllers_read_only_what_they_say_they_need(
    kind: str, run: list[Met], start: int
) -> None:
    config = controller_of(kind, global_batch=start, **EAGER)
    bare = replay(config, [declared(config, met) for met in run])
    assert [d.global_batch for d in replay(config, run)] == [d.global_batch for d in bare]


@pytest.mark.parametrize("kind", CONTROLLERS)
@settings(max_examples=30, deadline=None)
@given(bounds=limits(), start=st.integers(1, 3000))
def test_the_first_batch_is_within_the_limits(kind: str, bounds: Limits, start: int) -> None:
    decision = controller_of(kind, global_batch=start).start(bounds)
    assert bounds.allows(decision.global_batch)
    assert decision.changed == (decision.global_batch != start)


@pytest.mark.parametrize("kind", CONTROLLERS)
@settings(max_examples=30, deadline=None)
@given(seen=st.lists(summaries, min_size=1, max_size=30))
def test_equal_limits_never_change_the_batch(kind: str, seen: list[GradientSummary]) -> None:
    bounds = Limits(dataset_size=20, world_size=2, min_batch=8, max_batch=8)
    config = controller_of(kind, global_batch=8, **EAGER)
    assert not any(
        decision.changed for decision in replay(config, [(s, bounds, None) for s in seen])
    )


@pytest.mark.parametrize(
    "kind", [kind for kind, cls in CONTROLLERS.items() if issubclass(cls, AdaptiveConfig)]
)
def test_without_estimates_every_measuring_controller_holds(kind: str) -> None:
    bounds = Limits(dataset_size=200)
    config = controller_of(kind, global_batch=8, **EAGER)
    decisions = replay(config, [(GradientSummary(), bounds, None)] * 10)
    assert not any(decision.changed for decision in decisions)


@pytest.mark.parametrize("kind", CONTROLLERS)
def test_controllers_are_chosen_by_kind(kind: str) -> None:
    config = controller_of(kind)
    found = TypeAdapter(AnyController).validate_python(config.model_dump())
    assert found == config
    assert type(found) is CONTROLLERS[kind]


@pytest.mark.parametrize("kind", CONTROLLERS)
def test_a_batch_of_zero_is_refused(kind: str) -> None:
    with pytest.raises(ValidationError):
        controller_of(kind, global_batch=0)


@pytest.mark.parametrize("kind", RULES)
@given(
    summary=summaries,
    batch=st.integers(1, 10**7),
    base=st.integers(1, 10**7),
    samples=st.integers(0, 10**6),
)
def test_lr_factors_are_finite_and_one_at_the_base(
    kind: str, summary: GradientSummary, batch: int, base: int, samples: int
) -> None:
    rule = RULES[kind](**NEEDED.get(kind, {}))
    progress = Progress(dataset_size=100, samples=samples)
    factor = rule.factor(batch, base, summary, progress)
    assert math.isfinite(factor)
    assert factor >= 0
    assert rule.factor(base, base, summary, progress) == 1.0


@pytest.mark.parametrize(
    "kind", [kind for kind, cls in RULES.items() if "max_factor" in cls.model_fields]
)
def test_capped_rules_keep_their_cap(kind: str) -> None:
    rule = RULES[kind](max_factor=1.5, **NEEDED.get(kind, {}))
    summary = GradientSummary(noise_trace=1.0, signal_sqnorm=0.0, observations=5)
    assert rule.factor(10_000, 1, summary, Progress(dataset_size=1, samples=10**9)) == 1.5


@pytest.mark.parametrize("kind", RULES)
def test_rules_are_chosen_by_kind(kind: str) -> None:
    rule = RULES[kind](**NEEDED.get(kind, {}))
    assert type(TypeAdapter(AnyLrRule).validate_python(rule.model_dump())) is RULES[kind]
