"""Several Ray nodes on one machine, and what is known of the run that plays on them."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import ray

from adaptive_platform.bench.faults import Orders
from adaptive_platform.errors import UserError

__all__ = [
    "Stage",
    "adopt_orphans",
    "descendants",
    "end_descendants",
    "leave_with_parent",
    "workers",
]

_NODE_CPUS = 2
_STORE_BYTES = 80 * 2**20
_PREEMPTION = 2
"""Ray's DRAIN_NODE_REASON_PREEMPTION."""
_DRAIN_SECONDS = 60.0
_PR_SET_CHILD_SUBREAPER = 36
"""See prctl(2)."""
_WORKERS = ("ray::RayTrainWorker", "ray::RecruitWorker")
_END_SECONDS = 10.0


class Stage:
    """Nodes of two CPUs each beside a head without any.

    Args:
        nodes: How many.
        host: Address of the head and of this process; any of this machine where empty.
    """

    def __init__(self, nodes: int, host: str = "") -> None:
        from ray.cluster_utils import Cluster

        head: dict[str, Any] = {"num_cpus": 0, "object_store_memory": _STORE_BYTES}
        ours: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        if host:
            head["node_ip_address"] = ours["_node_ip_address"] = host
        head["include_dashboard"] = False
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self._size = nodes
        self._nodes: list[Any] = []
        self._draining: list[Any] = []
        self.machines: tuple[str, ...] = ()
        """Ray's ids of the workers' nodes by rank."""
        for _ in range(nodes):
            self.add_node()
        ray.init(address=self._cluster.address, **ours)
        self.begin(Orders(None), None)

    def begin(self, orders: Orders, disk: Path | None) -> None:
        """A new run: the nodes are as many as at first, and nothing is known of its workers.

        Args:
            orders: What its workers follow.
            disk: Small file system that its directory lies on; None for any.
        """
        self.machines = ()
        self.clear_drained()
        while len(self._nodes) > self._size:
            self._remove(self._nodes[-1])
        while len(self._nodes) < self._size:
            self.add_node()
        self.orders = orders
        self.disk = disk
        self.pids: tuple[int, ...] = ()
        """Processes of the workers by rank."""

    def clear_drained(self) -> None:
        """Take those nodes away that were announced to go and have no worker any more."""
        for node in [n for n in self._draining if n.node_id not in self.machines]:
            self._draining.remove(node)
            self._remove(node)

    def pid(self, rank: int) -> int:
        """Process of a rank, of the last one where there are fewer.

        Any worker where membership is not live and nobody tells of ranks.
        """
        pids = self.pids or sorted(workers())
        return pids[min(rank, len(pids) - 1)]

    def add_node(self) -> None:
        """One more node; from the main thread only, as Ray wants it."""
        added = self._cluster.add_node(num_cpus=_NODE_CPUS, object_store_memory=_STORE_BYTES)
        self._nodes.append(added)

    def kill_node_of(self, rank: int) -> None:
        """End all processes of a rank's node at once."""
        self._remove(self._node_of(rank))

    def drain_node_of(self, rank: int) -> None:
        """Announce that a rank's node will be taken away in a minute."""
        node = self._node_of(rank)
        client = ray._raylet.GcsClient(address=self._cluster.address)
        deadline_ms = int((time.time() + _DRAIN_SECONDS) * 1000)
        client.drain_node(node.node_id, _PREEMPTION, "for the bench", deadline_ms)
        self._draining.append(node)

    def cut_link_of(self, rank: int) -> None:
        """Pull the cable of a rank's node, where nodes have networks of their own (`Hosts`).

        Raises:
            UserError: On this stage they share one.
        """
        raise UserError(f"link of worker {rank}: the nodes of this stage share one network.")

    def close(self) -> None:
        """End everything."""
        ray.shutdown()
        self._cluster.shutdown()

    def _node_of(self, rank: int) -> Any:
        machine = self.machines[min(rank, len(self.machines) - 1)]
        (node,) = [node for node in self._nodes if node.node_id == machine]
        return node

    def _remove(self, node: Any) -> None:
        if node in self._nodes:
            self._nodes.remove(node)
            self._cluster.remove_node(node, allow_graceful=False)


def adopt_orphans() -> None:
    """Processes whose parents end become this one's, so that none gets out of sight.

    On Linux; elsewhere they are init's, and those that a node left behind are not counted.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def leave_with_parent() -> None:
    """From now on, end this process and all below it once nobody is left who waits for it."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        end_descendants()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def descendants(pid: int | None = None) -> dict[int, str]:
    """Commands of the living processes below one, by their ids."""
    words = ["ps", "-eo", "pid=,ppid=,stat=,args="]
    listed = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    below: dict[int, list[tuple[int, str]]] = {}
    for line in listed.splitlines():
        fields = line.split(None, 3)
        ended = len(fields) < 4 or fields[2].startswith("Z")
        if not ended and fields[3] != " ".join(words):
            below.setdefault(int(fields[1]), []).append((int(fields[0]), fields[3]))
    found: dict[int, str] = {}
    parents = [os.getpid() if pid is None else pid]
    while parents:
        for child, command in below.get(parents.pop(), ()):
            found[child] = command
            parents.append(child)
    return found


def workers() -> list[int]:
    """Processes of workers below this one."""
    return [pid for pid, command in descendants().items() if command.startswith(_WORKERS)]


def end_descendants(pid: int | None = None) -> None:
    """End everything below a process, whatever it does."""
    deadline = time.monotonic() + _END_SECONDS
    while (left := descendants(pid)) and time.monotonic() < deadline:
        for each in left:
            try:
                os.kill(each, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.1)
