"""Sparse sums in the loop: dense equals momentum SGD, nothing is lost, resumes are the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import with_reducers
from runs import Points, assert_same, recipe, train

from adaptive_platform.collectives import Reducer, RingConfig
from adaptive_platform.collectives.sparse_config import SparseConfig
from adaptive_platform.errors import UserError
from adaptive_platform.training.sparse_exchange import SparseExchange

HALF = {"chunk": 8, "dense_epochs": 0.0, "sparsities": [0.5]}
RING = {"kind": "ring", "timeout_seconds": 20}


def run(sparse: dict[str, Any] | None, world_size: int = 2, momentum: float = 0.0, **where: Any):
    config = recipe(
        "stop.epochs=3",
        f"optimizer.momentum={momentum}",
        reducer=RING | {"sparse": sparse},
    )
    return train(config, world_size=world_size, data=Points(48), **where)


def test_while_everything_travels_it_is_momentum_sgd() -> None:
    dense = run({"chunk": 8, "dense_epochs": 99.0})
    plain = run(None, momentum=0.9)
    assert_same(dense[0].weights, plain[0].weights, 1e-6)
    assert_same(dense[1].weights, dense[0].weights, 0.0)


def test_sparse_runs_agree_on_all_workers_and_differ_from_dense_ones() -> None:
    outcomes = run(HALF)
    assert_same(outcomes[1].weights, outcomes[0].weights, 0.0)
    assert not torch.equal(outcomes[0].weights["0.weight"], run(None)[0].weights["0.weight"])
    losses = [record.loss for record in outcomes[0].watcher.steps]
    assert sum(losses[-3:]) < sum(losses[:3]), "it does not learn"
    assert all(record.noise_scale is None for record in outcomes[0].watcher.steps)


def test_fewer_bytes() -> None:
    few = {"chunk": 8, "dense_epochs": 0.0, "sparsities": [0.9]}

    def sent(sparse: dict[str, Any] | None) -> int:
        # Checkpoints gather what waits to be sent, so there is only the last one.
        seldom = "checkpoint.every=100 epochs"
        config = recipe(
            "stop.epochs=20", seldom, "optimizer.momentum=0", reducer=RING | {"sparse": sparse}
        )
        return train(config, world_size=2, data=Points(48))[0].run.reducer.bytes_sent

    dense, sparse = sent(None), sent(few)
    # 103 gradients become 13 norms and two chunks; the rider of about 20 numbers stays.
    assert sparse < 0.5 * dense


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_resumed_run_is_the_same(tmp_path, world_size: int) -> None:
    whole = run(HALF, world_size)[0]
    run(HALF, world_size, run_dir=tmp_path, stop_after=7)
    resumed = run(HALF, world_size, run_dir=tmp_path, must_resume=True)
    assert_same(resumed[0].weights, whole.weights, 0.0)


def test_resuming_with_other_workers_and_without_residuals(tmp_path) -> None:
    run(HALF, 3, run_dir=tmp_path, stop_after=5)
    run(HALF, 2, run_dir=tmp_path, must_resume=True, stop_after=5)
    told = run(HALF | {"chunk": 4}, 1, run_dir=tmp_path, must_resume=True)[0].watcher.events
    assert not any("residuals" in event.text for event in told), "they do not depend on chunks"


def test_a_plain_checkpoint_starts_with_nothing_waiting(tmp_path) -> None:
    run(None, 2, run_dir=tmp_path, stop_after=5)
    told = run(HALF, 2, run_dir=tmp_path, must_resume=True)[0].watcher.events
    assert any("no residuals" in event.text for event in told)


def exchange(reducer: Reducer, length: int = 20) -> SparseExchange:
    found = SparseExchange(SparseConfig.model_validate(HALF), reducer, lambda: 0.0)
    found.prepare([length, 7], torch.device("cpu"))
    return found


def gradients_of(rank: int, step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return [torch.randn(20, generator=generator), torch.randn(7, generator=generator)]


def test_a_step_that_does_not_count_leaves_no_trace() -> None:
    def body(reducer: Reducer) -> None:
        tried, clean = exchange(reducer), exchange(reducer)
        for step in range(4):
            wasted = gradients_of(reducer.rank, 100 + step)
            wasted[0][3] = float("nan")
            tried.sum(wasted, torch.ones(2))
            ours, theirs = gradients_of(reducer.rank, step), gradients_of(reducer.rank, step)
            rider = torch.tensor([1.0, reducer.rank])
            tried.sum(ours, rider)
            clean.sum(theirs, torch.zeros(2))
            tried.commit()
            clean.commit()
            assert all(map(torch.equal, ours, theirs))
            assert rider.tolist() == [2.0, 1.0]

    with_reducers(RingConfig(timeout_seconds=20), 2, body)


@pytest.mark.parametrize("at", range(0, 20, 8))
def test_a_value_that_is_not_finite_shows_even_where_it_stays_at_home(at: int) -> None:
    def body(reducer: Reducer) -> bool:
        found = gradients_of(reducer.rank, 0)
        if reducer.rank == 1:
            found[0][at] = float("inf")
        exchange(reducer).sum(found, torch.zeros(1))
        return all(bool(torch.isfinite(each).all()) for each in found)

    assert with_reducers(RingConfig(timeout_seconds=20), 2, body) == [False, False]


@pytest.mark.parametrize("workers_then", [1, 2, 5])
def test_what_waits_is_dealt_out_to_the_workers_of_today(workers_then: int) -> None:
    def save(reducer: Reducer) -> list[dict[str, Any]]:
        ours = exchange(reducer)
        for step in range(3):
            ours.sum(gradients_of(reducer.rank, step), torch.zeros(1))
            ours.commit()
        return ours.state_dict()

    saved = with_reducers(RingConfig(timeout_seconds=20), 3, save)[0]
    assert len(saved) == 3

    def load(reducer: Reducer) -> list[dict[str, Any]]:
        ours = exchange(reducer)
        assert ours.load(saved) == []
        return ours.state_dict()

    loaded = with_reducers(RingConfig(timeout_seconds=20), workers_then, load)[0]
    assert len(loaded) == workers_then
    for index in (0, 1):
        for name in ("residual", "velocity"):
            before = sum(worker["buckets"][index][name] for worker in saved)
            after = sum(worker["buckets"][index][name] for worker in loaded)
            torch.testing.assert_close(after, before)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["optimizer.momentum=0.9"], r"reducer\.sparse\.momentum"),
        (["optimizer.kind=adamw", "optimizer.lr=0.001"], "must be sgd or lars"),
        (["lr_rule.kind=adascale"], "measured noise"),
        (["lr_rule={kind: linear, clock: scale_invariant}"], "measured noise"),
        (["batch.kind=noise_scale"], "measured noise"),
        (["clip_norm=1.0"], "clip_norm"),
        (["vr.gamma=0.1"], "vr: does not go together"),
        (["reducer.wire_dtype=bfloat16"], "wire_dtype"),
        (["precision.dtype=float16"], "loss scale"),
        (["sync.kind=local_sgd"], r"sync\.kind"),
    ],
)
def test_what_does_not_go_together_is_refused(overrides: list[str], said: str) -> None:
    words = (
        overrides if "optimizer.kind=adamw" in overrides else ["optimizer.momentum=0", *overrides]
    )
    with pytest.raises(UserError, match=said):
        recipe(*words, reducer=RING | {"sparse": HALF})
