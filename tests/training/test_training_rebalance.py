"""Shares that follow the workers' speeds: other shares, the same batch, samples and weights."""

from __future__ import annotations

import time
from typing import Any

import pytest
from living import KilledError, Scene, live
from runs import Points, assert_same, linear_net, recipe, train
from torch.distributed import PrefixStore
from torch.nn import functional as F

from adaptive_platform.bench.processes import run_group
from adaptive_platform.checkpoints.store import CheckpointStore, read_state
from adaptive_platform.collectives import Membership
from adaptive_platform.data import PythonConfig, wrap_dataset
from adaptive_platform.errors import UserError
from adaptive_platform.recipe import load_recipe
from adaptive_platform.training.run import TrainingRun

WORKERS, SAMPLES, BATCH = 3, 96, 24
SLOW, SECONDS = 2, 0.002
SETTINGS = {
    "name": "test",
    "seed": 3,
    "stop": {"epochs": 5},
    "data": {"kind": "python"},
    "batch": {"kind": "fixed", "global_batch": BATCH},
    "lr_rule": {"kind": "none"},
    "optimizer": {"kind": "sgd", "lr": 0.1, "momentum": 0.9},
    "schedule": {"kind": "constant"},
    "reducer": {"kind": "ring", "timeout_seconds": 30},
    "report": {"record_sample_ids": True, "evaluate_every": "0 epochs"},
}


class _Records:
    """Keeps the sample ids of each step."""

    def __init__(self) -> None:
        self.ids: list[list[list[int]]] = []
        self.told: list[str] = []

    def step(self, record: Any, fraction_done: float) -> None:
        self.ids.append(record.sample_ids)

    def event(self, record: Any) -> None:
        self.told.append(record.kind)

    def decision(self, record: Any) -> None: ...

    def evaluation(self, record: Any) -> None: ...

    def keep(self) -> None: ...

    def lead(self, records: Any, step: int) -> None: ...

    def follow(self) -> None: ...

    def advice(self, workers: int) -> None: ...

    def stop_requested(self) -> bool:
        return False

    def durable_step(self) -> int:
        return 0


def one_is_slow(membership: Membership) -> list[Any]:
    """Runs in each process, with equal shares and with others; the last worker is slower."""
    return [_run(membership, rebalance=False), _run(membership, rebalance=True)]


def _run(membership: Membership, *, rebalance: bool) -> Any:
    records = _Records()
    model = linear_net()
    config = load_recipe(SETTINGS, [f"membership.rebalance={rebalance}"])
    seconds = SECONDS * (3 if membership.rank == SLOW else 1)
    store = PrefixStore(f"rebalance {rebalance}", membership.store)
    with TrainingRun(
        config,
        model,
        wrap_dataset(Points(SAMPLES)),
        PythonConfig(),
        Membership(store, membership.rank, membership.world_size),
        observer=records,
    ) as run:
        for batch in run:
            time.sleep(seconds * len(batch.targets))
            outputs = model(batch.inputs)
            run.backward(F.cross_entropy(outputs, batch.targets, reduction="none"), outputs)
        parts = run.state.shares.parts if run.state.shares else None
    weights = [parameter.flatten().tolist() for parameter in model.parameters()]
    return records.ids, records.told, weights, parts


def test_a_slow_process_gets_fewer_samples_and_the_run_is_the_same():
    found = run_group(WORKERS, one_is_slow, timeout_seconds=120)
    (even_ids, _, even_weights, _), (ids, told, weights, _) = found[0]
    assert "rebalanced" in told
    assert len({each[1][3] for each in found}) == 1, "all workers decide alike"
    sizes = [len(share) for share in ids[-1]]
    assert sum(sizes) == BATCH
    assert sizes[SLOW] < min(sizes[:SLOW]), sizes
    assert [len(share) for share in even_ids[-1]] == [BATCH // WORKERS] * WORKERS
    together = [sorted(i for share in step for i in share) for step in ids]
    assert together == [sorted(i for share in step for i in share) for step in even_ids]
    for value, other in zip(weights, even_weights, strict=True):
        assert value == pytest.approx(other, rel=1e-4, abs=1e-5)
    assert all(each[1][2] == weights for each in found), "alike to the bit"


def _uneven(scene: Scene) -> None:
    """As if the first worker had been found slow, at the same step on all workers."""
    shares = scene.run.state.shares
    assert shares is not None
    if scene.step == 1 and len(shares.parts) == 3:
        shares.parts = (2, 11, 11)


def test_a_change_of_workers_begins_with_equal_shares():
    config = recipe("stop.epochs=2", "membership.rebalance=true", "batch.global_batch=24")
    data = Points(240)
    (plain, *_) = train(recipe("stop.epochs=2", "batch.global_batch=24"), world_size=3, data=data)

    def trouble(scene: Scene) -> None:
        _uneven(scene)
        if scene.step == 5 and scene.member == "c":
            raise KilledError

    lives = live(config, 3, trouble, data=data)
    first = lives["a"]
    sizes = [[len(share) for share in r.sample_ids] for r in first.watcher.steps]
    assert sizes[0] == [8, 8, 8]
    assert sizes[3] == [2, 11, 11]
    assert sizes[6] == [12, 12]
    assert first.ids == [sorted(ids) for ids in plain.ids]
    assert_same(first.weights, plain.weights, 1e-5)
    assert_same(first.weights, lives["b"].weights, 0.0)


def test_shares_are_in_the_checkpoint(tmp_path):
    config = recipe("stop.epochs=1", "membership.rebalance=true", "batch.global_batch=24")
    live(config, 3, _uneven, data=Points(96), run_dir=tmp_path)
    store = CheckpointStore(str(tmp_path))
    saved = read_state(store.read(store.saved()[-1]))["run"]["shares"]
    assert saved["parts"] == [2, 11, 11]
    # Goes on with them where there are as many workers, else with equal ones.
    longer = recipe("stop.epochs=2", "membership.rebalance=true", "batch.global_batch=24")
    for workers, parts in ((3, (2, 11, 11)), (2, (1, 1))):
        outcomes = train(longer, world_size=workers, data=Points(96), run_dir=tmp_path)
        sizes = [len(share) for share in outcomes[0].watcher.steps[0].sample_ids]
        assert sizes == [24 * part // sum(parts) for part in parts]
        break


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["model.normalization.kind=group"], "normalization"),
        (["sync.kind=local_sgd"], "sync.kind = local_sgd"),
    ],
)
def test_what_wants_equal_shares_is_refused(words, field):
    with pytest.raises(UserError, match=field):
        load_recipe("quickstart", ["membership.rebalance=true", *words])
