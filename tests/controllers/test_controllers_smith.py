from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from adaptive_platform.controllers import Limits, Observation
from adaptive_platform.controllers.smith import SmithConfig
from adaptive_platform.progress import Progress
from adaptive_platform.summary import GradientSummary


def run(config: SmithConfig, limits: Limits, epochs: int) -> list[tuple[float, int, float]]:
    """(epochs, batch, learning-rate factor) before each step."""
    controller, batch = config.build(), config.global_batch
    progress, seen = Progress(dataset_size=limits.dataset_size), []
    while progress.epoch < epochs:
        seen.append((progress.epochs, batch, controller.lr_factor))
        taken = min(batch, limits.dataset_size - progress.cursor)
        progress = progress.committed(consumed=taken, trained=taken, gain=1.0)
        batch = controller.decide(
            Observation(
                progress=progress, summary=GradientSummary(), global_batch=batch, limits=limits
            )
        ).global_batch
    return seen


def test_three_stages_take_1_24_instead_of_3_units_of_updates() -> None:
    config = SmithConfig(global_batch=10, decays=("10 epochs", "20 epochs"), factor=5)
    steps = run(config, Limits(dataset_size=1000), epochs=30)
    assert len(steps) == 10 * 100 * 1.24
    assert {batch for _, batch, _ in steps} == {10, 50, 250}
    assert {factor for _, _, factor in steps} == {1.0}


@settings(max_examples=50, deadline=None)
@given(
    start=st.integers(1, 40),
    factor=st.floats(1.1, 9),
    cap=st.integers(40, 300),
    world=st.integers(1, 7),
)
def test_noise_equals_that_of_the_decaying_recipe(
    start: int, factor: float, cap: int, world: int
) -> None:
    config = SmithConfig(
        global_batch=start,
        decays=("1 epochs", "2 epochs", "3 epochs"),
        factor=factor,
        max_batch=cap,
    )
    limits = Limits(dataset_size=280, world_size=world)
    largest = 0
    for epochs, batch, lr_factor in run(config, limits, epochs=4):
        if batch == start and lr_factor == 1.0 and epochs < 1:
            continue
        due = sum(epochs >= at for at in (1, 2, 3))
        assert lr_factor / batch == pytest.approx(factor**-due / start)
        assert batch >= largest
        largest = batch
        assert batch <= cap


def test_a_capped_batch_never_changes_again_and_the_rate_decays() -> None:
    config = SmithConfig(global_batch=10, decays=("1 epochs", "2 epochs", "3 epochs"), max_batch=50)
    stages = dict.fromkeys((b, f) for _, b, f in run(config, Limits(dataset_size=1000), epochs=4))
    assert list(stages) == [(10, 1.0), (50, 1.0), (50, 0.2), (50, pytest.approx(0.04))]


@pytest.mark.parametrize(
    "fields",
    [
        {"decays": ()},
        {"decays": ("2 epochs", "1 epochs")},
        {"decays": ("1 epochs", "10 steps")},
        {"decays": ("1 epochs",), "factor": 1.0},
        {"decays": ("1 epochs",), "max_batch": 7},
    ],
)
def test_senseless_settings_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        SmithConfig(global_batch=8, **fields)
