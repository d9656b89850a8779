"""A stage whose nodes have networks of their own: namespaces on one bridge, with cables to pull."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

import ray

from adaptive_platform.bench.stage import Stage
from adaptive_platform.errors import RunFailedError, UserError

__all__ = ["Hosts", "clear_hosts"]

_NETWORK = "10.79.0"
_BRIDGE = "apc-bridge"
_START_SECONDS = 60.0
_LOOK_SECONDS = 0.2


@dataclass(slots=True)
class _Host:
    """One node in a namespace; looks like a node of Ray's test cluster as far as `Stage` goes."""

    name: str
    address: str
    node_id: str = ""


class Hosts(Stage):
    """As `Stage`, over network namespaces. Needs root, `ip` and a kernel with bridges.

    Raises:
        UserError: It is not allowed here.
    """

    def __init__(self, nodes: int) -> None:
        self._made = 0
        self._bridge()
        super().__init__(nodes, f"{_NETWORK}.1")

    def add_node(self) -> None:
        """See `Stage.add_node`; one at a time, as Ray tells them apart by when they come."""
        host = _Host(f"apc-host{self._made}", f"{_NETWORK}.{10 + self._made}")
        self._made += 1
        _call(f"ip netns add {host.name}")
        _call(f"ip link add {host.name}p type veth peer name eth0 netns {host.name}")
        _call(f"ip link set {host.name}p master {_BRIDGE} up")
        _call(f"ip -n {host.name} addr add {host.address}/24 dev eth0")
        _call(f"ip -n {host.name} link set lo up")
        _call(f"ip -n {host.name} link set eth0 up")
        words = f"ip netns exec {host.name} {sys.executable} -m ray.scripts.scripts start "
        words += f"--address={self._cluster.address} --node-ip-address={host.address} "
        words += "--num-cpus=2 --object-store-memory=83886080 --disable-usage-stats"
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "eth0"}
        started = subprocess.run(
            words.split(), env=environment, capture_output=True, text=True, check=False
        )
        if started.returncode:
            raise RunFailedError(f"a node in a namespace did not start: {started.stdout[-500:]}")
        self._nodes.append(host)

    def cut_link_of(self, rank: int) -> None:
        """Pull the cable of a rank's node."""
        _call(f"ip link set {self._node_of(rank).name}p down")

    def close(self) -> None:
        """See `Stage.close`."""
        super().close()
        for host in list(self._nodes):
            self._remove(host)
        _call(f"ip link del {_BRIDGE}", check=False)

    def _node_of(self, rank: int) -> Any:
        machine = self.machines[min(rank, len(self.machines) - 1)]
        address = {n["NodeID"]: n["NodeManagerAddress"] for n in ray.nodes()}[machine]
        (host,) = [host for host in self._nodes if host.address == address]
        return host

    def _remove(self, node: Any) -> None:
        self._nodes.remove(node)
        deadline = time.monotonic() + _START_SECONDS
        while (pids := _pids_in(node.name)) and time.monotonic() < deadline:
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(_LOOK_SECONDS)
        _call(f"ip link del {node.name}p", check=False)
        _call(f"ip netns del {node.name}", check=False)

    def _bridge(self) -> None:
        clear_hosts()
        if not _call(f"ip link add {_BRIDGE} type bridge", check=False):
            raise UserError("network namespaces need root, `ip` and a kernel with bridges")
        _call(f"ip addr add {_NETWORK}.1/24 dev {_BRIDGE}")
        _call(f"ip link set {_BRIDGE} up")


def clear_hosts() -> None:
    """Remove namespaces and bridge of hosts whose process ended before it could."""
    try:
        words = ["ip", "netns", "list"]
        listed = subprocess.run(words, capture_output=True, text=True, check=False).stdout
    except FileNotFoundError:
        return
    for line in listed.splitlines():
        if line.startswith("apc-host"):
            name = line.split()[0]
            _call(f"ip link del {name}p", check=False)
            _call(f"ip netns del {name}", check=False)
    _call(f"ip link del {_BRIDGE}", check=False)


def _pids_in(namespace: str) -> list[int]:
    words = ["ip", "netns", "pids", namespace]
    listed = subprocess.run(words, capture_output=True, text=True, check=False).stdout
    return [int(pid) for pid in listed.split()]


def _call(words: str, *, check: bool = True) -> bool:
    try:
        done = subprocess.run(words.split(), capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return False
    if check and done.returncode:
        raise RunFailedError(f"`{words}` failed: {done.stderr.strip()}")
    return done.returncode == 0
