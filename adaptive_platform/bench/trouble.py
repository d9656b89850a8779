"""A small language of trouble: what is done to the workers and nodes of a run, and when."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, Protocol

import ray

__all__ = [
    "AddNode",
    "Drain",
    "Freeze",
    "Kill",
    "KillNode",
    "Moment",
    "Slow",
    "Stage",
    "Trouble",
]

_NODE_CPUS = 2
_STORE_BYTES = 80 * 2**20
_PREEMPTION = 2
"""Ray's DRAIN_NODE_REASON_PREEMPTION."""


class Stage:
    """Several Ray nodes on this machine, the head without CPUs, and what is known of the run."""

    def __init__(self, nodes: int) -> None:
        from ray.cluster_utils import Cluster

        settings = {"object_store_memory": _STORE_BYTES, "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **settings})
        self.nodes: list[Any] = []
        for _ in range(nodes):
            self.add_node()
        ray.init(address=self._cluster.address, log_to_driver=False, logging_level="ERROR")
        self.pids: tuple[int, ...] = ()
        """Processes of the workers by rank."""
        self.machines: tuple[str, ...] = ()
        """Ray's ids of their nodes."""

    def add_node(self) -> None:
        """One more node; from the main thread only, as Ray wants it."""
        added = self._cluster.add_node(num_cpus=_NODE_CPUS, object_store_memory=_STORE_BYTES)
        self.nodes.append(added)

    def kill_node(self, index: int) -> None:
        """End all processes of a node at once."""
        self._cluster.remove_node(self.nodes.pop(index), allow_graceful=False)

    def drain(self, index: int) -> None:
        """Announce that a node will be taken away in a minute."""
        client = ray._raylet.GcsClient(address=self._cluster.address)
        deadline_ms = int((time.time() + 60.0) * 1000)
        client.drain_node(self.nodes[index].node_id, _PREEMPTION, "for the bench", deadline_ms)

    def close(self) -> None:
        """End everything."""
        ray.shutdown()
        self._cluster.shutdown()


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
        os.kill(stage.pids[self.rank], signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class Freeze:
    """A worker stands still for a while, and goes on as if nothing had been."""

    rank: int
    seconds: float

    def act(self, stage: Stage) -> None:
        """See `Trouble.act`."""
        pid = stage.pids[self.rank]
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(self.seconds, os.kill, (pid, signal.SIGCONT)).start()


@dataclass(frozen=True, slots=True)
class Slow:
    """A worker runs only a part of the time."""

    rank: int
    factor: float
    """Times that it takes longer."""
    seconds: float

    def act(self, stage: Stage) -> None:
        """See `Trouble.act`."""
        pid = stage.pids[self.rank]
        threading.Thread(target=self._brake, args=(pid,), daemon=True).start()

    def _brake(self, pid: int) -> None:
        slice_seconds = 0.02
        end = time.monotonic() + self.seconds
        try:
            while time.monotonic() < end:
                os.kill(pid, signal.SIGSTOP)
                time.sleep(slice_seconds * (self.factor - 1.0))
                os.kill(pid, signal.SIGCONT)
                time.sleep(slice_seconds)
        except ProcessLookupError:
            return


@dataclass(frozen=True, slots=True)
class KillNode:
    """All processes of a node end at once, its raylet included."""

    index: int

    def act(self, stage: Stage) -> None:
        """See `Trouble.act`."""
        stage.kill_node(self.index)


@dataclass(frozen=True, slots=True)
class AddNode:
    """A node joins the cluster."""

    def act(self, stage: Stage) -> None:
        """See `Trouble.act`."""
        stage.add_node()


@dataclass(frozen=True, slots=True)
class Drain:
    """A node will be taken away; its workers should leave before."""

    index: int

    def act(self, stage: Stage) -> None:
        """See `Trouble.act`."""
        stage.drain(self.index)


@dataclass(frozen=True, slots=True)
class Moment:
    """When something happens: once the run has come to a step, with that many workers."""

    step: int
    trouble: Trouble
    workers: int
    """Number of members that has to be reached first."""
    done: list[float] = field(default_factory=list)
    """When it was done, in seconds since 1970."""


def strays() -> int:
    """Processes of workers that are left on this machine."""
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    names = ("ray::RayTrainWorker", "ray::RecruitWorker")
    return sum(line.startswith(names) for line in listed.stdout.splitlines())
