from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from adaptive_platform.controllers import Limits, Observation
from adaptive_platform.controllers.schedule import ScheduleConfig
from adaptive_platform.progress import Progress
from adaptive_platform.summary import GradientSummary


def steps_and_changes(config: ScheduleConfig, size: int, epochs: int) -> tuple[int, list[Any]]:
    """Run the data through; committed steps, and (epoch, cursor, batch) of each change."""
    controller, limits = config.build(), Limits(dataset_size=size)
    batch, progress, changes = config.global_batch, Progress(dataset_size=size), []
    while progress.epoch < epochs:
        taken = min(batch, size - progress.cursor)
        progress = progress.committed(consumed=taken, trained=taken, gain=1.0)
        decision = controller.decide(
            Observation(
                progress=progress, summary=GradientSummary(), global_batch=batch, limits=limits
            )
        )
        if decision.changed:
            changes.append((progress.epoch, progress.cursor, decision.global_batch))
        batch = decision.global_batch
    return progress.step, changes


def stages(*pairs: tuple[str, int]) -> list[dict[str, Any]]:
    return [{"at": at, "batch": batch} for at, batch in pairs]


def test_the_wide_schedule_of_the_paper_takes_2010_steps() -> None:
    config = ScheduleConfig(
        global_batch=2176 * 16,
        stages=stages(("30 epochs", 69_632), ("45 epochs", 87_040), ("75 epochs", 121_856)),
    )
    steps, changes = steps_and_changes(config, size=1_281_167, epochs=90)
    assert steps == 2010
    assert changes == [(30, 0, 69_632), (45, 0, 87_040), (75, 0, 121_856)]


def test_stages_wait_for_an_epoch_unless_told_otherwise() -> None:
    given = stages(("15 samples", 5))
    waiting = ScheduleConfig(global_batch=2, stages=given)
    assert steps_and_changes(waiting, 10, 4)[1] == [(2, 0, 5)]
    at_once = ScheduleConfig(global_batch=2, stages=given, boundaries="step")
    assert steps_and_changes(at_once, 10, 4)[1] == [(1, 6, 5)]


def test_a_skipped_last_step_delays_the_stage_by_one_step_not_one_epoch() -> None:
    controller = ScheduleConfig(global_batch=2, stages=stages(("1 epochs", 5))).build()
    progress = Progress(dataset_size=4).committed(2, 2, 1.0).skipped(2).committed(2, 2, 1.0)
    decision = controller.decide(
        Observation(
            progress=progress,
            summary=GradientSummary(),
            global_batch=2,
            limits=Limits(dataset_size=9),
        )
    )
    assert decision.changed
    assert decision.global_batch == 4 + 1
    again = replace(progress, cursor=3)
    assert not controller.decide(
        Observation(
            progress=again, summary=GradientSummary(), global_batch=5, limits=Limits(dataset_size=9)
        )
    ).considered


@pytest.mark.parametrize(
    "pairs",
    [
        [("2 epochs", 8), ("1 epochs", 16)],
        [("1 epochs", 8), ("100 samples", 16)],
        [("0 epochs", 8)],
        [],
    ],
)
def test_stages_out_of_order_are_refused(pairs: list[tuple[str, int]]) -> None:
    with pytest.raises(ValidationError):
        ScheduleConfig(global_batch=4, stages=stages(*pairs))
