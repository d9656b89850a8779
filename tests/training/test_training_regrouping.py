"""Workers are lost, leave and join while a run goes on: same samples, same weights, no gaps."""

from __future__ import annotations

import pytest
from living import KilledError, Life, live
from runs import assert_same, recipe, train


def kill(member: str, step: int):
    def trouble(name, run):
        if name == member and run.progress.step == step:
            raise KilledError

    return trouble


def whole(lives: dict[str, Life]) -> list[Life]:
    """Those that were there at the end, which must agree to the bit."""
    there = [life for life in lives.values() if not life.killed and not life.run.left]
    for life in there[1:]:
        assert_same(there[0].weights, life.weights, 0.0)
        assert life.run.progress == there[0].run.progress
    return there


def ids_of(life: Life) -> list[list[int]]:
    return [sorted(i for share in r.sample_ids for i in share) for r in life.watcher.steps]


@pytest.mark.parametrize("victim", ["a", "b", "c"])
def test_survivors_go_on_where_the_lost_worker_left_them(victim):
    config = recipe("stop.epochs=2")
    (plain, *_) = train(config, world_size=3)
    lives = live(config, 3, kill(victim, 4))
    there = whole(lives)
    assert len(there) == 2
    for life in there:
        assert ids_of(life) == [sorted(ids) for ids in plain.ids]
        assert [r.step for r in life.watcher.steps] == list(range(1, 11))
        assert [r.world_size for r in life.watcher.steps] == [3] * 4 + [2] * 6
        assert_same(life.weights, plain.weights, 1e-5)
