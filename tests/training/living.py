"""Runs whose workers come and go, on threads: a roster with a lock, and trouble at set places."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from runs import Points, Watcher, _weights, linear_net, sample_loss
from torch import Tensor, nn
from torch.distributed import HashStore

from adaptive_platform.checkpoints.store import CheckpointStore
from adaptive_platform.cluster.roster import Generation, Roster, Verdict
from adaptive_platform.collectives import CollectiveError, Membership
from adaptive_platform.data import PythonConfig, wrap_dataset
from adaptive_platform.recipe import Recipe
from adaptive_platform.training.regrouping import NextMembers
from adaptive_platform.training.run import TrainingRun


class KilledError(Exception):
    """This worker ends here, without a word to the others."""


class Club:
    """A roster that threads share."""

    def __init__(self, members: list[str], max_workers: int = 99, max_losses: int = 9) -> None:
        self.roster = Roster(max_workers, max_losses)
        self.roster.begin(members)
        self.stores = {0: HashStore()}
        self._changed = threading.Condition()
        self._left: set[str] = set()

    def lose(self, member: str) -> None:
        with self._changed:
            self.roster.lose(member, "killed")
            self._settle()

    def finish(self, member: str) -> None:
        with self._changed:
            self.roster.finish(member)
            self._settle()

    def ask_to_leave(self, member: str) -> None:
        with self._changed:
            self.roster.ask_to_leave(member, "node drains")

    def next(self, member: str, join: bool = False) -> NextMembers | None:
        """None where the member leaves; a CollectiveError's place is taken by LookupError."""
        with self._changed:
            before = self.roster.generation.number
            (self.roster.join if join else self.roster.stop)(member)
            self._settle()

            def over() -> bool:
                now = self.roster.generation
                here = now.number > before and (member in now.members or not join)
                return here or self.roster.verdict is not Verdict.GO_ON

            assert self._changed.wait_for(over, 30), f"{member} waits for ever"
            now = self.roster.generation
            if now.number == before:
                raise LookupError(self.roster.verdict.value)
            if member not in now.members:
                return None
            return NextMembers(
                membership=self._membership(now, member),
                lost=now.lost,
                joined=len(now.joined),
                left=now.left,
            )

    def first(self, member: str) -> Membership:
        return self._membership(self.roster.generation, member)

    def _membership(self, now: Generation, member: str) -> Membership:
        store = self.stores.setdefault(now.number, HashStore())
        return Membership(store, now.members.index(member), len(now.members), now.number)

    def _settle(self) -> None:
        self.roster.next()
        self._changed.notify_all()


@dataclass
class Link:
    """One worker's link to the club."""

    club: Club
    member: str
    joining: bool

    def change_wanted(self) -> bool:
        return self.club.roster.change_wanted

    def next(self, failure: CollectiveError | None) -> NextMembers | None:
        try:
            found = self.club.next(self.member, self.joining)
        except LookupError:
            assert failure is not None
            raise failure from None
        self.joining = False
        return found


@dataclass
class Life:
    """What one worker saw until it ended."""

    member: str
    run: TrainingRun
    watcher: Watcher
    weights: dict[str, Tensor] = field(default_factory=dict)
    killed: bool = False

    @property
    def ids(self) -> list[list[int]]:
        """Sample ids of each step, over all workers."""
        return [sorted(i for s in r.sample_ids or [] for i in s) for r in self.watcher.steps]


@dataclass
class Scene:
    """What trouble gets to see, ahead of each forward pass of one worker."""

    member: str
    run: TrainingRun
    club: Club

    @property
    def step(self) -> int:
        return self.run.progress.step


Trouble = Callable[[Scene], None]
"""Called ahead of each forward pass of each worker; raises `KilledError` for a kill."""


def live(
    config: Recipe,
    workers: int,
    trouble: Trouble = lambda scene: None,
    *,
    joiners: int = 0,
    eval_data: Any = None,
    data: Any = None,
    model: Callable[[], nn.Module] = linear_net,
    run_dir: Path | None = None,
    max_losses: int = 9,
    begin: Trouble = lambda scene: None,
    observer: Callable[[str], Any] = lambda name: Watcher(),
) -> dict[str, Life]:
    """Train with workers `a`, `b`, ...; joiners come as soon as they may.

    `begin` is called once per worker, before its first pass. `observer` makes each worker's own.
    """
    names = [chr(ord("a") + i) for i in range(workers + joiners)]
    club = Club(names[:workers], max_losses=max_losses)
    lives: dict[str, Life] = {}
    errors: dict[str, BaseException] = {}
    torch.manual_seed(0)
    models = {name: model() for name in names}

    def work(name: str) -> None:
        watcher = observer(name)
        joining = name not in names[:workers]
        run = TrainingRun(
            config,
            models[name],
            wrap_dataset(data if data is not None else Points(40), eval_data, None),
            config.data if isinstance(config.data, PythonConfig) else PythonConfig(),
            Membership(HashStore(), 0, 1) if joining else club.first(name),
            store=CheckpointStore(str(run_dir)) if run_dir is not None else None,
            observer=watcher,
            regrouping=Link(club, name, joining),
            joining=joining,
            makes_adversaries=True,
        )
        lives[name] = life = Life(name, run, watcher)
        scene = Scene(name, run, club)
        try:
            begin(scene)
            for batch in run:
                trouble(scene)
                outputs = run.model(batch.inputs)
                run.backward(sample_loss(outputs, batch.targets), outputs)
            club.finish(name)
        except KilledError:
            life.killed = True
        finally:
            run.close()
            if life.killed:
                club.lose(name)
        life.weights = _weights(run.model)

    def call(name: str) -> None:
        try:
            work(name)
        except BaseException as error:
            errors[name] = error
            club.lose(name)

    threads = [threading.Thread(target=call, args=(name,), daemon=True) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[min(errors)]
    assert not any(thread.is_alive() for thread in threads), "a worker hangs"
    return lives
