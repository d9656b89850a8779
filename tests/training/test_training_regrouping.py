"""Workers are lost, leave and join while a run goes on: same samples, same weights, no gaps."""

from __future__ import annotations

import random
import time

import pytest
import torch
from living import KilledError, Life, Scene, Trouble, live
from runs import Outcome, Points, Watcher, assert_same, recipe, train
from torch import nn

from adaptive_platform.checkpoints.store import CheckpointStore, read_state
from adaptive_platform.collectives import CollectiveError
from adaptive_platform.errors import RunFailedError
from adaptive_platform.training import stepping


def kill(**steps: int) -> Trouble:
    """Each named worker ends in its forward pass of the step after `steps[name]` others."""

    def trouble(scene: Scene) -> None:
        if scene.step == steps.get(scene.member):
            raise KilledError

    return trouble


def check(lives: dict[str, Life], plain: Outcome, tolerance: float = 1e-5) -> Life:
    """Those at the end agree to the bit, and the run is the one without trouble. The first one."""
    there = [life for life in lives.values() if not life.killed and not life.run.left]
    (first,) = [life for life in there if life.run.is_first]
    for life in there:
        assert_same(first.weights, life.weights, 0.0)
        assert life.run.progress == first.run.progress
        assert life.run.state.global_batch == first.run.state.global_batch
    assert first.ids == [sorted(ids) for ids in plain.ids]
    steps = plain.watcher.steps
    assert [r.step for r in first.watcher.steps] == [r.step for r in steps]
    assert [r.lr for r in first.watcher.steps] == pytest.approx([r.lr for r in steps])
    assert [r.step for r in first.watcher.evaluations] == [
        r.step for r in plain.watcher.evaluations
    ]
    assert_same(first.weights, plain.weights, tolerance)
    return first


@pytest.mark.parametrize("victim", ["a", "b", "c"])
def test_survivors_go_on_where_the_lost_worker_left_them(victim):
    config = recipe("stop.epochs=2")
    (plain, *_) = train(config, world_size=3, eval_data=Points(9))
    first = check(live(config, 3, kill(**{victim: 4}), eval_data=Points(9)), plain)
    assert [r.world_size for r in first.watcher.steps] == [3] * 4 + [2] * 6
    assert [e.step for e in first.watcher.events if e.kind == "lost"] == [4]


def test_one_worker_is_left_of_four_after_three_losses_at_different_steps():
    config = recipe("stop.epochs=2", "reducer.kind=torus")
    (plain, *_) = train(config, world_size=4)
    first = check(live(config, 4, kill(a=2, b=2, c=6)), plain)
    assert [r.world_size for r in first.watcher.steps] == [4] * 2 + [2] * 4 + [1] * 4


@pytest.mark.parametrize("victim", ["a", "b"])
def test_a_worker_lost_in_an_evaluation_costs_no_step(victim):
    config = recipe("stop.epochs=2")
    (plain, *_) = train(config, world_size=2, eval_data=Points(9))

    def begin(scene: Scene) -> None:
        def on_pass(module: nn.Module, inputs: object) -> None:
            if not module.training and scene.step == 5 and scene.member == victim:
                raise KilledError

        scene.run.model.register_forward_pre_hook(on_pass)

    first = check(live(config, 2, begin=begin, eval_data=Points(9)), plain)
    assert [r.world_size for r in first.watcher.steps] == [2] * 5 + [1] * 5


@pytest.mark.parametrize("behind", ["a", "b", "c"])
def test_one_that_missed_the_end_of_a_reduction_catches_up(behind):
    """The others have committed the step; it takes state and records from one of them."""
    config = recipe("stop.epochs=2")
    (plain, *_) = train(config, world_size=3)

    def begin(scene: Scene) -> None:
        if scene.member != behind:
            return
        gather = scene.run._parts.step.gather

        def broken(**words: object) -> object:
            found = gather(**words)
            if scene.step != 5:
                return found
            scene.run._parts.step.gather = gather
            scene.run.reducer.close()
            raise CollectiveError(
                operation="all_reduce",
                group="world",
                rank=scene.run.reducer.rank,
                world_size=3,
                generation=0,
                timeout_seconds=1,
                after_seconds=0,
            )

        scene.run._parts.step.gather = broken

    first = check(live(config, 3, begin=begin), plain)
    assert [r.world_size for r in first.watcher.steps] == [3] * 10


@pytest.mark.parametrize("workers", [1, 2])
def test_a_joiner_takes_part_with_the_others_state(workers):
    config = recipe(
        "stop.epochs=4", "batch.kind=noise_scale", "batch.global_batch=8", "batch.max_batch=20"
    )
    lives = live(config, workers, slowly, joiners=1, data=Points(60), eval_data=Points(9))
    first, joiner = lives["a"], lives[chr(ord("a") + workers)]
    sizes = [r.world_size for r in first.watcher.steps]
    assert set(sizes) == {workers, workers + 1}
    assert sizes == sorted(sizes)
    assert_same(first.weights, joiner.weights, 0.0)
    assert joiner.run.progress == first.run.progress
    assert joiner.run.state.summary() == first.run.state.summary()
    assert joiner.run.state.accuracy == first.run.state.accuracy
    for epoch in range(4):
        rows = zip(first.watcher.steps, first.ids, strict=True)
        assert sorted(i for r, ids in rows if r.epoch == epoch for i in ids) == list(range(60))
    assert [e.kind for e in first.watcher.events if e.kind in ("joined", "lost")] == ["joined"]


def slowly(scene: Scene) -> None:
    """Long enough that a joiner, who builds its run first, comes before the end."""
    torch.rand(100, 10_000).sum()
    if scene.step > 5:
        assert wait_for(lambda: scene.club.roster.generation.number > 0)


def wait_for(condition, seconds: float = 120.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


@pytest.mark.parametrize("member", ["a", "b"])
def test_who_is_asked_to_leave_leaves_between_two_steps(member):
    config = recipe("stop.epochs=2")
    (plain, *_) = train(config, world_size=2)

    def trouble(scene: Scene) -> None:
        if scene.step == 4 and scene.member == member:
            scene.club.ask_to_leave(member)

    lives = live(config, 2, trouble)
    first = check(lives, plain)
    assert lives[member].run.left
    assert lives[member].run.progress.step == 5
    assert lives["a"].watcher.leads == ([-1] if member == "a" else [])
    assert lives["b"].watcher.leads == ([5] if member == "a" else [])
    assert [r.world_size for r in first.watcher.steps] == [2] * 5 + [1] * 5
    assert [e.kind for e in first.watcher.events if e.kind in ("left", "lost")] == ["left"]


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_ratios_of_gradients_go_on_where_a_worker_leaves(kind):
    """Taken once, at the first step, by shards: whoever stays has those of who left."""
    config = recipe("stop.epochs=2", optimizer={"kind": kind, "lr": 0.01}, vr={"every": 100})
    (plain, *_) = train(config, world_size=3)

    def trouble(scene: Scene) -> None:
        if scene.step == 4 and scene.member == "b":
            scene.club.ask_to_leave("b")

    first = check(live(config, 3, trouble), plain)
    assert [r.world_size for r in first.watcher.steps] == [3] * 5 + [2] * 5
    assert first.run.state.variance is not None
    assert not first.run.state.variance.due(99)


def test_ratios_go_to_a_joiner():
    config = recipe("stop.epochs=4", vr={"every": 100})
    lives = live(config, 2, slowly, joiners=1, data=Points(60))
    first, joiner = lives["a"], lives["c"]
    assert {r.world_size for r in first.watcher.steps} == {2, 3}
    assert_same(first.weights, joiner.weights, 0.0)
    for life in lives.values():
        assert life.run.state.variance is not None
        assert not life.run.state.variance.due(99)


def test_ratios_start_anew_where_a_worker_is_lost():
    config = recipe("stop.epochs=2", vr={"every": 100})
    lives = live(config, 3, kill(b=4))
    first, other = lives["a"], lives["c"]
    assert_same(first.weights, other.weights, 0.0)
    assert [r.world_size for r in first.watcher.steps] == [3] * 4 + [2] * 6
    for life in (first, other):
        variance = life.run.state.variance
        assert variance is not None
        assert [variance.due(4 + n) for n in (99, 100)] == [False, True]


def test_the_second_first_worker_saves_and_what_it_saves_is_resumed(tmp_path):
    config = recipe("stop.epochs=2", "checkpoint.every=3 steps")
    (plain, *_) = train(config, world_size=2)
    live(config, 2, kill(a=4), run_dir=tmp_path)
    store = CheckpointStore(str(tmp_path))
    assert [saved.step for saved in store.saved()][-2:] == [9, 10]
    saved = read_state(store.read(store.saved()[-1]))
    assert_same(saved["model"], plain.weights, 1e-5)


def test_batch_norm_agrees_after_a_loss_and_a_dropped_step_leaves_no_trace():
    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.ReLU(), nn.Linear(10, 3))

    config = recipe("stop.epochs=2", "batch.global_batch=12")
    lives = live(config, 3, kill(b=3), model=net, data=Points(48))
    a, c = lives["a"], lives["c"]
    for name, value in a.weights.items():
        if not name.endswith("num_batches_tracked"):
            assert torch.equal(value, c.weights[name]), name


def test_too_many_losses_without_a_step_end_the_run():
    """As with a sample that kills whoever reads it."""

    def trouble(scene: Scene) -> None:
        if scene.step == 3 and scene.run.reducer.rank == 0:
            raise KilledError

    with pytest.raises(CollectiveError):
        live(recipe("stop.epochs=2"), 4, trouble, max_losses=1)


def test_a_worker_lost_while_all_give_up_costs_no_record_of_the_last_dropped_step(monkeypatch):
    agree = stepping.raise_first
    killed = []

    def dying(reducer, error):
        if error is not None and reducer.rank == 1 and not killed:
            killed.append(error)
            raise KilledError
        agree(reducer, error)

    monkeypatch.setattr(stepping, "raise_first", dying)
    data = Points(40)
    data.inputs[:] = torch.nan
    watchers = {name: Watcher() for name in "ab"}
    config = recipe("stop.epochs=2", "precision.max_skipped_in_a_row=3")
    with pytest.raises(RunFailedError, match="4 steps in a row"):
        live(config, 2, data=data, observer=watchers.__getitem__)
    assert len(killed) == 1
    assert [r.skipped for r in watchers["a"].steps] == [True] * 3


@pytest.mark.parametrize("seed", range(4))
def test_any_mixture_of_kills_departures_and_joins_is_the_run_without_them(seed):
    """At random steps; each worker that goes makes room for one that waits."""
    config = recipe("stop.epochs=3", "batch.global_batch=6")
    (plain, *_) = train(config, world_size=1, eval_data=Points(9))
    chance = random.Random(seed)
    fate = {name: (chance.choice(["kill", "leave"]), chance.randrange(1, 20)) for name in "abcde"}

    def trouble(scene: Scene) -> None:
        what, step = fate.get(scene.member, ("", -1))
        if scene.step < step or len(scene.club.roster.present) < 2:
            return
        if what == "leave":
            scene.club.ask_to_leave(scene.member)
        else:
            raise KilledError

    check(live(config, 3, trouble, joiners=3, eval_data=Points(9)), plain, 1e-4)


def test_a_slow_worker_is_named_within_twenty_steps():
    def trouble(scene: Scene) -> None:
        time.sleep(0.06 if scene.member == "b" else 0.02)

    first = live(recipe("stop.steps=20", "batch.global_batch=4"), 2, trouble)["a"]
    (told,) = [e for e in first.watcher.events if e.kind == "straggler"]
    assert told.text.startswith("worker 1 takes ")


@pytest.mark.parametrize("follow", [False, True])
def test_the_number_of_workers_is_advised_at_the_end_of_an_epoch(follow):
    config = recipe("workers=[1,4]", "stop.epochs=4", f"membership.follow_advice={follow}")
    outcome = train(config, world_size=2, seconds_of=lambda samples: 0.01 * samples)[0]
    told = [e for e in outcome.watcher.events if e.kind == "advice"]
    assert told
    assert all("worker(s) for a batch of 8" in e.text for e in told)
    assert bool(outcome.watcher.advised) == follow
    assert set(outcome.watcher.advised) <= {1, 2, 3, 4}
