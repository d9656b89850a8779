from __future__ import annotations

from typing import Any

import pytest

from adaptive_platform.controllers import Decision, Limits, Observation
from adaptive_platform.controllers.goodput import GoodputConfig, split_of
from adaptive_platform.progress import Progress
from adaptive_platform.summary import GradientSummary, ThroughputModel

MODEL = ThroughputModel(
    alpha_grad=0.05,
    beta_grad=0.001,
    alpha_local=0.02,
    beta_local=0.005,
    alpha_node=0.06,
    beta_node=0.01,
    gamma=2.0,
)
NOISY = GradientSummary(noise_trace=1000.0, signal_sqnorm=1.0, observations=100)


def decide(
    limits: Limits,
    *,
    batch: int = 100,
    summary: GradientSummary = NOISY,
    model: ThroughputModel | None = MODEL,
    **config: Any,
) -> Decision:
    controller = GoodputConfig(**{"global_batch": batch, "max_growth": 1000.0} | config).build()
    return controller.decide(
        Observation(
            progress=Progress(dataset_size=limits.dataset_size, samples=10**7),
            summary=summary,
            global_batch=batch,
            limits=limits,
            throughput=model,
        )
    )


def goodput(batch: int, limits: Limits) -> float:
    microbatch, accumulation = split_of(batch, limits)
    seconds = MODEL.step_seconds(limits.world_size, 1, microbatch, accumulation)
    return batch / seconds * (1000 + 100) / (1000 + batch)


def test_scores_are_those_of_the_sheet() -> None:
    limits = Limits(dataset_size=400, world_size=4)
    scores = {c.global_batch: c.score for c in decide(limits).candidates if c.score}
    assert scores[400] == pytest.approx(2054.55, rel=1e-5)
    small_memory = Limits(dataset_size=800, world_size=4, largest_microbatch=100)
    last = decide(small_memory).candidates
    full = next(c for c in last if c.global_batch == 800 and c.score)
    assert full.score == pytest.approx(1613.65, rel=1e-5)
    assert (full.microbatch, full.accumulation) == (100, 2)


def test_it_finds_the_best_batch() -> None:
    limits = Limits(dataset_size=20_000, world_size=4)
    decision = decide(limits)
    best = max(range(100, 20_001), key=lambda batch: goodput(batch, limits))
    assert decision.changed
    assert goodput(decision.global_batch, limits) >= 0.995 * goodput(best, limits)
    assert decision.inputs["goodput_gain"] == pytest.approx(
        goodput(decision.global_batch, limits) / goodput(100, limits) - 1
    )


def test_accumulation_that_does_not_pay_is_not_chosen() -> None:
    limits = Limits(dataset_size=20_000, world_size=4, largest_microbatch=100)
    chosen = decide(limits).global_batch
    assert 300 < chosen <= 400
    assert split_of(chosen, limits)[1] == 1


def test_a_gain_below_the_threshold_changes_nothing() -> None:
    limits = Limits(dataset_size=20_000, world_size=4)
    near = decide(limits).global_batch * 3 // 4
    stays = decide(limits, batch=near, global_batch=100)
    assert not stays.changed
    assert "would bring" in stays.reason
    assert decide(limits, batch=near, global_batch=100, min_gain=0.0).changed


def test_it_never_goes_below_its_start() -> None:
    quiet = GradientSummary(noise_trace=1e-6, signal_sqnorm=1.0, observations=100)
    decision = decide(Limits(dataset_size=20_000), batch=400, global_batch=100, summary=quiet)
    assert min(c.global_batch for c in decision.candidates) == 100
    assert decision.global_batch == 200  # no further than half in one decision


def test_it_holds_without_speed_or_signal() -> None:
    limits = Limits(dataset_size=20_000)
    blind = GradientSummary(noise_trace=1.0, signal_sqnorm=-1.0, observations=100)
    for decision in (decide(limits, model=None), decide(limits, summary=blind)):
        assert not decision.changed
        assert "hold" in decision.reason


@pytest.mark.parametrize(
    ("batch", "limits", "split"),
    [
        (1, Limits(dataset_size=9), (1, 1)),
        (8, Limits(dataset_size=9), (4, 2)),
        (9, Limits(dataset_size=9, world_size=2), (5, 1)),
        (9, Limits(dataset_size=9, world_size=2, largest_microbatch=2), (2, 3)),
    ],
)
def test_splits_use_as_few_passes_as_fit(
    batch: int, limits: Limits, split: tuple[int, int]
) -> None:
    assert split_of(batch, limits) == split
