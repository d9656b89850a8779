"""Every strategy against its rule: worked examples of the papers, limits, and properties."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from adaptive_platform.progress import Progress
from adaptive_platform.settings import variants_of
from adaptive_platform.sync import FlatWeights, Peers, SyncConfig, SyncStrategy
from adaptive_platform.sync.easgd import EasgdConfig
from adaptive_platform.sync.gossip import GossipConfig, draw_peers
from adaptive_platform.sync.local_sgd import LocalSgdConfig

KINDS = sorted(variants_of(SyncConfig))
DIFFERING = [kind for kind in KINDS if variants_of(SyncConfig)[kind].lets_copies_differ]


class Table:
    """Workers as plain numbers that take turns: each call is made by all ranks, then answered."""

    def __init__(self, config: SyncConfig, start: Sequence[float], seed: int = 0) -> None:
        self.parameters = [nn.Parameter(torch.tensor([float(x)])) for x in start]
        self.size = len(start)
        self.config, self.seed = config, seed
        self.calls: list[str] = []

    def run(self, act: Callable[[int, SyncStrategy], None], strategies: list[SyncStrategy]) -> None:
        """Replay `act` on all ranks until no answer is missing; calls are matched by order."""
        known: list[list[Tensor]] = []
        before = [p.detach().clone() for p in self.parameters]
        saved = [(s.state_dict(), s.own_state()) for s in strategies]
        saved = [({k: _copy(v) for k, v in c.items()}, dict(o)) for c, o in saved]
        while True:
            asked: list[Tensor | None] = [None] * self.size
            ended = 0
            for rank, strategy in enumerate(strategies):
                self.parameters[rank].data.copy_(before[rank])
                strategy.load_state_dict(saved[rank][0])
                strategy.load_own_state(saved[rank][1])
                self._rank, self._known, self._position = rank, known, 0
                try:
                    act(rank, strategy)
                    ended += 1
                except _MissingError as missing:
                    asked[rank] = missing.tensor
            if ended == self.size:
                return
            assert ended == 0, "workers disagree on how many calls they make"
            known.append([t for t in asked if t is not None])
            self.calls.append("message")

    def strategies(self) -> list[SyncStrategy]:
        def sum_all(tensor: Tensor) -> None:
            tensor.copy_(sum(self._next(tensor), torch.zeros_like(tensor)))

        def exchange(tensor: Tensor, to: Sequence[int], sources: Sequence[int]) -> list[Tensor]:
            del to
            sent = self._next(tensor)
            return [sent[rank] for rank in sources]

        return [
            self.config.build(
                FlatWeights([parameter]),
                Peers(rank=rank, world_size=self.size, sum=sum_all, exchange=exchange),
                seed=self.seed,
            )
            for rank, parameter in enumerate(self.parameters)
        ]

    def _next(self, tensor: Tensor) -> list[Tensor]:
        if self._position == len(self._known):
            raise _MissingError(tensor.clone())
        self._position += 1
        return self._known[self._position - 1]

    @property
    def values(self) -> list[float]:
        return [float(p.detach()) for p in self.parameters]


class _MissingError(Exception):
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _copy(value: object) -> object:
    return value.clone() if isinstance(value, Tensor) else value


def step(
    table: Table, strategies: list[SyncStrategy], samples: Sequence[int] | None = None
) -> None:
    table.run(lambda rank, s: s.before_step(), strategies)
    table.run(lambda rank, s: s.after_step(samples[rank] if samples else 1), strategies)


def test_elastic_averaging_of_the_sheet() -> None:
    """x = (1, 3), centre 0, alpha 1/4 -> (0.75, 2.25), centre 1, and the total stays 4."""
    table = Table(EasgdConfig(beta=0.5), [0.0, 0.0])
    strategies = table.strategies()
    for parameter, value in zip(table.parameters, (1.0, 3.0), strict=True):
        parameter.data.fill_(value)
    step(table, strategies)
    assert table.values == [0.75, 2.25]
    centre = float(strategies[0].state_dict()["centre"])
    assert centre == 1.0
    assert centre + sum(table.values) == 4.0


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=5),
    st.floats(0.1, 1.0),
    st.integers(1, 4),
)
def test_elastic_averaging_conserves_the_total(x: list[float], beta: float, turns: int) -> None:
    table = Table(EasgdConfig(beta=beta), [0.0] * len(x))
    strategies = table.strategies()
    for parameter, value in zip(table.parameters, x, strict=True):
        parameter.data.fill_(value)
    for _ in range(turns):
        step(table, strategies)
    total = float(strategies[0].state_dict()["centre"]) + sum(table.values)
    assert total == pytest.approx(sum(x), abs=1e-4)
    centres = {float(s.state_dict()["centre"]) for s in strategies}
    assert len(centres) == 1


def test_a_push_of_the_sheet() -> None:
    """Inbox 4 and 8, own 0 -> 4: found among seeds as an exchange in which both send to rank 0."""
    seed = next(
        seed for seed in range(1000)
        if [d[0] for d in draw_peers(seed, 1, 3, 1)][1:] == [0, 0]
        and draw_peers(seed, 1, 3, 1)[0][0] != 0
    )  # fmt: skip
    table = Table(GossipConfig(direction="push"), [0.0, 4.0, 8.0], seed)
    step(table, table.strategies())
    assert table.values[0] == 4.0


@pytest.mark.parametrize("direction", ["pull", "push"])
def test_gossip_keeps_what_is_equal_and_never_widens_the_spread(direction: str) -> None:
    for seed in range(20):
        equal = Table(GossipConfig(direction=direction, draws=2), [3.0] * 4, seed)
        step(equal, equal.strategies())
        assert equal.values == [3.0] * 4
        table = Table(GossipConfig(direction=direction), [1.0, 2.0, 5.0, 9.0], seed)
        strategies = table.strategies()
        spread = 8.0
        for _ in range(4):
            step(table, strategies)
            now = max(table.values) - min(table.values)
            assert now <= spread + 1e-6
            spread = now


def test_a_pull_reads_the_drawn_peer_and_leaves_it_alone() -> None:
    seed = 5
    table = Table(GossipConfig(), [1.0, 2.0, 4.0], seed)
    step(table, table.strategies())
    start = [1.0, 2.0, 4.0]
    drawn = draw_peers(seed, 1, 3, 1)
    assert table.values == [(start[i] + start[drawn[i][0]]) / 2 for i in range(3)]


def test_peers_are_drawn_uniformly_and_anew() -> None:
    draws = np.array([draw_peers(1, exchange, 4, 1) for exchange in range(1, 2001)]).ravel()
    counts = np.bincount(draws, minlength=4)
    assert abs(counts / len(draws) - 0.25).max() < 0.02
    assert draw_peers(1, 1, 4, 2) == draw_peers(1, 1, 4, 2) != draw_peers(1, 2, 4, 2)


@pytest.mark.parametrize(("period", "rounds"), [(1, 1), (3, 1), (2, 2), (1, 3)])
def test_local_sgd_averages_when_it_should(period: int, rounds: int) -> None:
    """Everyone on one node: floor(S / H) averages; after any of them the weights are equal."""
    table = Table(LocalSgdConfig(period=period, block_rounds=rounds), [0.0, 0.0, 0.0])
    strategies = table.strategies()
    for strategy in strategies:  # the node is everyone here
        object.__setattr__(strategy._peers, "sum_on_node", strategy._peers.sum)
    for number in range(1, 8):
        for rank, parameter in enumerate(table.parameters):
            parameter.data.add_(float(rank + number))
        messages = len(table.calls)
        step(table, strategies)
        assert len(table.calls) - messages == (number % period == 0)
        assert (len(set(table.values)) == 1) == (number % period == 0)


def test_copies_count_by_the_samples_they_learned_from() -> None:
    table = Table(LocalSgdConfig(period=2), [0.0, 0.0])
    strategies = table.strategies()
    step(table, strategies, [3, 1])
    for parameter, value in zip(table.parameters, (1.0, 9.0), strict=True):
        parameter.data.fill_(value)
    step(table, strategies, [3, 1])
    assert table.values == [3.0, 3.0]


def test_a_worker_without_samples_gets_the_others_mean() -> None:
    table = Table(LocalSgdConfig(period=1), [1.0, 5.0])
    step(table, table.strategies(), [0, 2])
    assert table.values == [5.0, 5.0]
    nobody = Table(LocalSgdConfig(period=1), [1.0, 5.0])
    step(nobody, nobody.strategies(), [0, 0])
    assert nobody.values == [3.0, 3.0]


def test_local_steps_begin_where_they_should() -> None:
    strategy = Table(LocalSgdConfig(start="2 epochs"), [0.0]).strategies()[0]
    at = Progress(dataset_size=10)
    assert strategy.sums_gradients(at)
    assert strategy.sums_gradients(at.committed(10, 10, 1.0).committed(9, 9, 1.0))
    assert not strategy.sums_gradients(at.committed(10, 10, 1.0).committed(10, 10, 1.0))


@pytest.mark.parametrize("kind", KINDS)
def test_one_worker_alone_keeps_its_own_weights(kind: str) -> None:
    """p = 1: every variant equals local SGD, up to the pull of the elastic centre."""
    table = Table(variants_of(SyncConfig)[kind](), [2.0])
    strategies = table.strategies()
    for _ in range(3):
        step(table, strategies)
    assert table.values == [2.0]
    agreed = strategies[0].agreed()
    assert agreed is None or float(agreed) == 2.0


@pytest.mark.parametrize("kind", DIFFERING)
def test_state_continues(kind: str) -> None:
    """Saved after five steps and put into new strategies: the sixth to tenth step are the same."""
    config = variants_of(SyncConfig)[kind](period=2)
    whole, first = Table(config, [1.0] * 3), Table(config, [1.0] * 3)
    of_whole, of_first = whole.strategies(), first.strategies()
    for number in range(10):
        for table in (whole, first):
            for rank, parameter in enumerate(table.parameters):
                parameter.data.add_(0.1 * (rank + number))
        step(whole, of_whole, [1, 2, 3])
        step(first, of_first, [1, 2, 3])
        if number == 4:
            states = [(s.state_dict(), s.own_state()) for s in of_first]
            of_first = first.strategies()
            for strategy, (common, own) in zip(of_first, states, strict=True):
                strategy.load_state_dict(common)
                strategy.load_own_state(own)
        assert first.values == whole.values


@pytest.mark.parametrize("kind", DIFFERING)
def test_agreed_weights_change_nothing_and_settle_gives_them_to_all(kind: str) -> None:
    table = Table(variants_of(SyncConfig)[kind](period=2), [1.0, 1.0, 1.0])
    strategies = table.strategies()
    for _ in range(3):
        for rank, parameter in enumerate(table.parameters):
            parameter.data.add_(float(rank))
        step(table, strategies)
    before = table.values
    found: dict[int, float] = {}

    def look(rank: int, strategy: SyncStrategy) -> None:
        agreed = strategy.agreed()
        assert agreed is not None
        found[rank] = float(agreed)

    table.run(look, strategies)
    assert table.values == before
    assert len(set(found.values())) == 1
    table.run(lambda rank, s: s.settle(), strategies)
    assert set(table.values) == set(found.values())


def test_flat_weights_leave_out_what_is_frozen_and_count_shared_ones_once() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    flat = FlatWeights(model.parameters())
    assert flat.read().numel() == 4 + 2
    flat.write(torch.arange(6.0))
    assert model[0].weight.flatten().tolist() == [0.0, 1.0, 2.0, 3.0]
    assert model[1].bias.tolist() == [4.0, 5.0]
    assert flat.read(extra=2).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 0.0, 0.0]
