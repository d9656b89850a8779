"""Gradients that travel in half precision: half the bytes, counts exact, close to the exact run."""

from __future__ import annotations

import pytest
import torch
from runs import Points, assert_same, recipe, train

WIRES = ["bfloat16", "float16"]
NARROWER = {"bfloat16": 2e-2, "float16": 3e-3}
"""How far ten steps stray from exact ones, relative: a few roundings to 8 or 11 bits."""


def run(wire: str | None, world_size: int, **where):
    config = recipe(
        "stop.steps=10",
        "batch.global_batch=16",
        "microbatch=4",
        "lr_rule.kind=adascale",
        reducer={"kind": "torus", "timeout_seconds": 20, "wire_dtype": wire},
    )
    return train(config, world_size=world_size, data=Points(160), **where)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("world_size", [2, 4])
def test_close_to_the_exact_run_and_equal_on_all_workers(wire: str, world_size: int) -> None:
    exact = run(None, world_size)
    narrow = run(wire, world_size)
    for outcome in narrow[1:]:
        assert_same(outcome.weights, narrow[0].weights, 0.0)
    assert_same(narrow[0].weights, exact[0].weights, NARROWER[wire])
    assert any(
        not torch.equal(narrow[0].weights[name], exact[0].weights[name])
        for name in exact[0].weights
    )
    for ours, theirs in zip(narrow[0].watcher.steps, exact[0].watcher.steps, strict=True):
        assert ours.gain == pytest.approx(theirs.gain, rel=NARROWER[wire])
        assert ours.global_batch == theirs.global_batch
    # The first losses were computed before any rounding: their sum travels exactly.
    first, exact_first = narrow[0].watcher.steps[0], exact[0].watcher.steps[0]
    assert first.loss == exact_first.loss
    assert first.lr == pytest.approx(exact_first.lr, rel=NARROWER[wire])


@pytest.mark.parametrize("wire", WIRES)
def test_splits_agree_to_rounding(wire: str) -> None:
    """F02 holds to 1e-5 only where nothing is rounded; one worker alone rounds nothing."""
    alone, four = run(wire, 1)[0], run(wire, 4)[0]
    assert_same(alone.weights, run(None, 1)[0].weights, 0.0)
    assert_same(four.weights, alone.weights, NARROWER[wire])


def test_half_the_bytes() -> None:
    exact, narrow = run(None, 2)[0].run, run("bfloat16", 2)[0].run
    ratio = narrow.reducer.bytes_sent / exact.reducer.bytes_sent
    # 103 gradients and about 20 numbers of the rider.
    assert 0.5 < ratio < 0.65


def test_a_resumed_run_is_the_same(tmp_path) -> None:
    whole = run("bfloat16", 2)[0]
    run("bfloat16", 2, run_dir=tmp_path, stop_after=4)
    resumed = run("bfloat16", 2, run_dir=tmp_path, must_resume=True)[0]
    assert_same(resumed.weights, whole.weights, 0.0)


def test_an_overflow_on_the_wire_is_a_skipped_step() -> None:
    """float16 ends at 65,504: what goes beyond is non-finite on all workers alike."""

    met: set[int] = set()

    def huge_once(run, outputs, targets):
        losses = torch.nn.functional.cross_entropy(outputs, targets, reduction="none")
        if run.progress.step < 2 or id(run) in met:
            return losses
        met.add(id(run))
        return losses * 1e7

    config = recipe(
        "stop.steps=4", reducer={"kind": "ring", "timeout_seconds": 20, "wire_dtype": "float16"}
    )
    outcomes = train(config, world_size=2, data=Points(80), loss=huge_once)
    skipped = [record.skipped for record in outcomes[0].watcher.steps]
    assert skipped == [False, False, True, False, False]
    assert all(torch.isfinite(value).all() for value in outcomes[0].weights.values())
    assert_same(outcomes[1].weights, outcomes[0].weights, 0.0)
