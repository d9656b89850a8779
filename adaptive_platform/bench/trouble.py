"""A small language of trouble: what is done to the workers and nodes of a run, and when."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from abc import abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from adaptive_platform.bench.stage import Stage
from adaptive_platform.checkpoints.store import CheckpointStore

__all__ = [
    "AddNode",
    "CutLink",
    "Drain",
    "FillDisk",
    "FreeDisk",
    "Freeze",
    "Kill",
    "KillAll",
    "KillNode",
    "Moment",
    "Order",
    "Slow",
    "Trouble",
]


class Trouble(Protocol):
    """Something that is done to a run."""

    @abstractmethod
    def act(self, stage: Stage) -> None:
        """Do it, and return at once."""


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL to the worker of a rank."""

    rank: int

    def act(self, stage: Stage) -> None:
        """See `Trouble.act`."""
        os.kill(stage.pid(self.rank), signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class KillAll:
    """SIGKILL to all workers at once."""

    def act(self, stage: Stage) -> None:
        """See `Trouble.act`."""
        for pid in stage.pids:
            os.kill(pid, signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class Order:
    """Something goes wrong inside of the worker of a rank, at a place that `faults` knows."""

    place: str
    rank: int

    def act(self, stage: Stage) -> None:
        """See `Trouble.act`."""
        stage.orders.give(self.place, stage.pid(self.rank))


@dataclass(frozen=True, slots=True)
class Slow:
    """The passes of a worker take longer for a while."""

    rank: int
    factor: float
    seconds: float

    def act(self, stage: Stage) -> None:
        """See `Trouble.act`."""
        pid = stage.pid(self.rank)
        stage.orders.give("slow", pid, str(self.factor))
        _later(self.seconds, lambda: stage.orders.take_back("slow", pid))


@dataclass(frozen=True, slots=True)
class Freeze:
    """A worker stands still for a while, and goes on as if nothing had been."""

    rank: int
    seconds: float

    def act(self, stage: Stage) -> None:
        """See `Trouble.act`."""
        pid = stage.pid(self.rank)
        os.kill(pid, signal.SIGSTOP)
        _later(self.seconds, lambda: os.kill(pid, signal.SIGCONT))


@dataclass(frozen=True, slots=True)
class KillNode:
    """All processes of the node that a rank lives on end at once, its raylet included."""

    rank: int

    def act(self, stage: Stage) -> None:
        """See `Trouble.act`."""
        stage.kill_node_of(self.rank)


@dataclass(frozen=True, slots=True)
class AddNode:
    """A node joins the cluster."""

    def act(self, stage: Stage) -> None:
        """See `Trouble.act`."""
        stage.add_node()


@dataclass(frozen=True, slots=True)
class Drain:
    """The node of a rank will be taken away; its workers should leave before."""

    rank: int

    def act(self, stage: Stage) -> None:
        """See `Trouble.act`."""
        stage.drain_node_of(self.rank)


@dataclass(frozen=True, slots=True)
class CutLink:
    """The network cable of the node that a rank lives on is pulled."""

    rank: int

    def act(self, stage: Stage) -> None:
        """See `Trouble.act`."""
        stage.cut_link_of(self.rank)


@dataclass(frozen=True, slots=True)
class FillDisk:
    """The file system of the run directory has no byte left."""

    def act(self, stage: Stage) -> None:
        """See `Trouble.act`."""
        assert stage.disk is not None
        with Path(stage.disk, "ballast").open("wb", buffering=0) as file:
            for size in (2**20, 2**12):
                try:
                    while file.write(bytes(size)) == size:
                        pass
                except OSError:
                    continue


@dataclass(frozen=True, slots=True)
class FreeDisk:
    """There is room again; the newest checkpoint has to be whole at that moment."""

    def act(self, stage: Stage) -> None:
        """See `Trouble.act`.

        Raises:
            CheckpointError: It is not.
        """
        assert stage.disk is not None
        (run,) = (each for each in stage.disk.iterdir() if each.is_dir())
        store = CheckpointStore(str(run))
        store.read(store.saved()[-1])
        Path(stage.disk, "ballast").unlink()
        assert shutil.disk_usage(stage.disk).free > 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """When something happens: so many steps after the last moment, or the begin."""

    trouble: Trouble
    steps: int = 30
    workers: int | None = None
    """Members that have to be there, neither more nor fewer; None for any number."""
    heard: str = ""
    """An event of this kind has to be heard first, since the last moment."""
    then: str = ""
    """An event of this kind is waited for afterwards."""
    coming: bool = False
    """A replacement has to be under way, and not in yet."""
    done: list[float] = field(default_factory=list)
    """When it was done, in seconds since 1970."""


def _later(seconds: float, act: object) -> None:
    def quietly() -> None:
        try:
            act()  # type: ignore[operator]
        except ProcessLookupError:
            return

    timer = threading.Timer(seconds, quietly)
    timer.daemon = True
    timer.start()
