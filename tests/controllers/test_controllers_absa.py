from __future__ import annotations

import math

import pytest

from adaptive_platform.controllers import Controller, Limits, Observation
from adaptive_platform.controllers.absa import AbsaConfig, AbsConfig
from adaptive_platform.controllers.lr_rules import LinearConfig
from adaptive_platform.progress import Progress
from adaptive_platform.summary import GradientSummary

LIMITS = Limits(dataset_size=1_000_000)


def epoch_end(
    controller: Controller,
    epoch: int,
    batch: int,
    eigenvalue: float | None,
    limits: Limits = LIMITS,
) -> int:
    """The batch after an epoch's last step."""
    return controller.decide(
        Observation(
            progress=Progress(dataset_size=1_000_000, epoch=epoch),
            summary=GradientSummary(hessian_top_eigenvalue=eigenvalue),
            global_batch=batch,
            limits=limits,
        )
    ).global_batch


def batches(config: AbsConfig | AbsaConfig, eigenvalues: list[float | None]) -> list[int]:
    controller, batch, seen = config.build(), config.global_batch, []
    for epoch, eigenvalue in enumerate(eigenvalues, start=1):
        batch = epoch_end(controller, epoch, batch, eigenvalue)
        seen.append(batch)
    return seen


def test_constant_curvature_doubles_every_ten_epochs_and_the_rate_follows() -> None:
    seen = batches(AbsConfig(global_batch=128), [1.0] * 90)
    assert [seen[epoch - 1] for epoch in (10, 20, 30, 40, 50, 60, 70, 90)] == [
        256, 512, 1024, 2048, 4096, 8192, 16384, 16384,
    ]  # fmt: skip
    assert seen[8] == 128
    rule, progress = LinearConfig(), Progress(dataset_size=1)

    def lr(epoch: int) -> float:
        decays = sum(epoch >= at for at in (30, 60, 80))
        return 0.1 * 0.2**decays * rule.factor(seen[epoch - 1], 128, GradientSummary(), progress)

    published = [0.2, 0.4, 0.16, 0.32, 0.64, 0.256, 0.512, 0.1024]
    assert [lr(epoch) for epoch in (10, 20, 30, 40, 50, 60, 70, 90)] == pytest.approx(published)


def test_falling_curvature_grows_against_its_last_trigger() -> None:
    seen = batches(AbsConfig(global_batch=1), [100, 60, 49, 40, 24, 24])
    assert seen == [1, 1, 2, 2, 4, 4]


def test_a_growth_by_curvature_restarts_the_duration() -> None:
    seen = batches(AbsConfig(global_batch=1, duration_epochs=3), [9, 4, 4, 4, 4, 4])
    assert seen == [1, 2, 2, 2, 4, 4]


@pytest.mark.parametrize("useless", [None, math.nan, math.inf, -50.0, 0.0])
def test_useless_eigenvalues_trigger_nothing_but_the_epoch_counts(useless: float | None) -> None:
    config = AbsConfig(global_batch=1, duration_epochs=4)
    assert batches(config, [9, useless, useless, useless]) == [1, 1, 1, 2]


def test_it_looks_once_per_epoch() -> None:
    controller = AbsConfig(global_batch=1, duration_epochs=2).build()
    assert [epoch_end(controller, 1, 1, 5.0) for _ in range(5)] == [1] * 5
    assert epoch_end(controller, 2, 1, 5.0) == 2


def test_adversarial_examples_halve_with_growth_and_end() -> None:
    config = AbsaConfig(global_batch=1, duration_epochs=1, max_ratio=8, adversarial_until=9)
    controller, batch, seen = config.build(), 1, []
    for epoch in range(1, 5):
        seen.append(controller.adversarial_fraction)
        batch = epoch_end(controller, epoch, batch, None)
    assert seen == [0.2, 0.1, 0.05, 0.0]
    late = AbsaConfig(global_batch=1, adversarial_until=2).build()
    epoch_end(late, 1, 1, None)
    assert late.adversarial_fraction == 0.2
    epoch_end(late, 2, 1, None)
    assert late.adversarial_fraction == 0.0
    assert AbsConfig().build().adversarial_fraction == 0.0


@pytest.mark.parametrize("stop", range(1, 9))
def test_a_restart_forgets_nothing(stop: int) -> None:
    config = AbsaConfig(global_batch=1, duration_epochs=3)
    straight, restarted = config.build(), config.build()
    batch = again = 1
    for epoch, eigenvalue in enumerate([9.0, 8.0, 4.0, 3.5, 3.0, 2.9, 1.5, 1.4], start=1):
        if epoch == stop:
            state = restarted.state_dict()
            restarted = config.build()
            restarted.load_state_dict(state)
        batch = epoch_end(straight, epoch, batch, eigenvalue)
        again = epoch_end(restarted, epoch, again, eigenvalue)
    assert restarted.state_dict() == straight.state_dict()
    assert again == batch == 8


def test_limits_hold_the_batch_back() -> None:
    controller = AbsConfig(global_batch=8, duration_epochs=1).build()
    tight = Limits(dataset_size=1_000_000, max_batch=10)
    assert epoch_end(controller, 1, 8, None, tight) == 10
