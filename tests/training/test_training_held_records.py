"""Records that every worker holds until they are durable."""

from __future__ import annotations

from dataclasses import replace

from runs import recipe, train

from adaptive_platform.report.records import EvalRecord
from adaptive_platform.training.held_records import HeldRecords


def records():
    (outcome,) = train(recipe("stop.epochs=1"))
    return outcome.watcher.steps


def test_a_worker_behind_takes_over_what_it_does_not_know():
    steps = records()
    ahead, behind = HeldRecords(), HeldRecords()
    for step in steps[:4]:
        ahead.add(step)
    for step in steps[:3]:
        behind.add(step)
    ahead.forget_before(2)
    assert ahead.records == steps[1:4]
    assert behind.take_over(ahead.first, ahead.records) == steps[3:4]
    assert behind.take_over(ahead.first, ahead.records) == []
    assert behind.records == steps[:4]


def test_one_that_joins_takes_over_all_that_is_not_durable():
    steps = records()
    held, new = HeldRecords(), HeldRecords()
    for step in steps:
        held.add(step)
    held.forget_before(3)
    assert new.take_over(held.first, held.records) == steps[2:]
    for one in (held, new):
        one.forget_before(5)
        assert (one.first, one.records) == (4, steps[4:])
    new.forget_before(1)
    assert new.records == steps[4:]


def test_a_score_after_skipped_steps_keeps_the_step_that_it_is_of():
    """The tables are cut where the oldest held record is: all of that step must be held."""
    step = records()[4]
    score = EvalRecord(step=5, epoch=1, samples_seen=40, loss=1.0)
    skipped = replace(step, step=6, skipped=True)
    held = HeldRecords()
    for record in (step, skipped, score):
        held.add(record)
    held.forget_before(6)
    assert held.records == [step, skipped, score]
    held.add(replace(step, step=6))
    held.add(replace(step, step=7))
    held.forget_before(7)
    assert [record.step for record in held.records] == [7]
