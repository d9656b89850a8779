"""A network cable that is pulled: two hosts in namespaces of their own. Needs root."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from torch._C._distributed_c10d import TCPStore

TIMEOUT_SECONDS = 6.0
BRIDGE, NETWORK = "apt-bridge", "10.78.0"
HOSTS = ("apt-host0", "apt-host1")

WORKER = """
import os
import sys
from datetime import timedelta
import torch
from torch._C._distributed_c10d import TCPStore
from adaptive_platform.collectives import CollectiveError, Membership, Reducer, TorusConfig

torch.set_num_threads(1)
host, port, rank, seconds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
store = TCPStore(host, port, is_master=False)
store.set(f"up/{rank}", "1")  # the limit below is for workers that have started
store.wait([f"up/{each}" for each in range(4)], timedelta(seconds=120))
config = TorusConfig(timeout_seconds=seconds)
reducer = Reducer(config, Membership(store, rank, 4, node_of_rank=("a", "a", "b", "b")))
buffer = torch.ones(100_000)
reducer.start(buffer).wait()
print("ready", flush=True)
try:
    for _ in range(100_000):
        reducer.start(buffer.fill_(1.0)).wait()
    print("went on")
except CollectiveError as error:
    took = error.after_seconds <= seconds + 1
    print("failed", error.group, "in time" if took else error, "lost", *error.peers, flush=True)
os._exit(0)  # the store's connection has a patience of its own
"""

usable = os.geteuid() == 0 and shutil.which("ip") is not None


def call(words: str, *, check: bool = True) -> bool:
    done = subprocess.run(words.split(), stderr=subprocess.DEVNULL, check=check)
    return done.returncode == 0


@pytest.fixture
def two_hosts():
    """Two namespaces on one bridge, which this process reaches as well."""
    if not usable or not call(f"ip link add {BRIDGE} type bridge", check=False):
        pytest.skip("network namespaces need root, ip and a kernel with bridges")
    try:
        call(f"ip addr add {NETWORK}.1/24 dev {BRIDGE}")
        call(f"ip link set {BRIDGE} up")
        for number, host in enumerate(HOSTS):
            call(f"ip netns add {host}")
            call(f"ip link add {host}p type veth peer name eth0 netns {host}")
            call(f"ip link set {host}p master {BRIDGE} up")
            call(f"ip -n {host} addr add {NETWORK}.{10 + number}/24 dev eth0")
            call(f"ip -n {host} link set lo up")
            call(f"ip -n {host} link set eth0 up")
        yield
    finally:
        for host in HOSTS:
            call(f"ip link del {host}p", check=False)
            call(f"ip netns del {host}", check=False)
        call(f"ip link del {BRIDGE}", check=False)


def test_a_cut_link_ends_the_operation_on_every_worker(two_hosts) -> None:
    store = TCPStore(
        f"{NETWORK}.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    environment = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    workers = []
    for rank in range(4):
        inside = f"ip netns exec {HOSTS[rank // 2]}".split()
        words = [f"{NETWORK}.1", str(store.port), str(rank), str(TIMEOUT_SECONDS)]
        workers.append(
            subprocess.Popen(
                [*inside, sys.executable, "-c", WORKER, *words],
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    try:
        for worker in workers:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "ready\n"
        call(f"ip link set {HOSTS[1]}p down")
        # Longer than the limit and the roll call, much shorter than TCP's own patience.
        said = [worker.communicate(timeout=180)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for line in said:
        # A short buffer's row may go on until it needs a sum that the cut has kept away.
        assert line.startswith(("failed column ", "failed row ")), said
        assert "in time" in line, said
    # Who can still reach the store names whom it waited for, and nobody who is still there.
    for line in said[:2]:
        lost = set(line.rpartition("lost ")[2].split())
        assert lost, said
        assert lost <= {"2", "3"}, said
