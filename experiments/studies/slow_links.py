"""Plans on hosts with slow network cards: network namespaces, a bridge, and `tc tbf`. Needs root.

    sudo python experiments/studies/slow_links.py --hosts 2 --workers-per-host 4 --mbit 200

Every host is a namespace with one interface that sends and receives at the given rate; the workers
of a host reach each other over its loopback. Each repeat times Gloo's own all-reduce and then each
plan. Everything is removed at the end. Without root it says so and ends with code 0.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from adaptive_platform.collectives import Membership, Reducer, ReducerConfig
from adaptive_platform.settings import variants_of

BRIDGE = "ap-bridge"
NETWORK = "10.77.0"
PLANS = ("torus", "hierarchical", "halving_doubling")


def main() -> None:
    """Build the network, run the workers, print the table, remove the network."""
    options = read_options()
    if options.rank is not None:
        work(options)
        return
    if os.geteuid() != 0:
        print("skipped: network namespaces need root, run it with sudo.")
        return
    if Path(f"/sys/class/net/{BRIDGE}").exists():
        sys.exit(
            f"a network of this study is up: end that run, or remove it with ip link del {BRIDGE}"
        )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that `finally` runs
    processes: list[subprocess.Popen[bytes]] = []
    try:
        build_network(options.hosts, options.mbit)
        store = TCPStore(f"{NETWORK}.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(options.hosts * options.workers_per_host):
            host = rank // options.workers_per_host
            words = [sys.executable, *sys.argv, "--rank", str(rank), "--port", str(store.port)]
            environment = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
            processes.append(
                subprocess.Popen(["ip", "netns", "exec", f"ap-host{host}", *words], env=environment)
            )
        for process in processes:
            if process.wait() != 0:
                sys.exit(f"a worker failed with code {process.returncode}")
    finally:
        for process in processes:
            process.kill()
        remove_network(options.hosts)


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--workers-per-host", type=int, default=4)
    parser.add_argument("--mbit", type=int, default=200, help="rate of a network card")
    parser.add_argument("--mb", type=float, nargs="+", default=[25.0], help="message sizes")
    parser.add_argument("--plans", nargs="+", default=PLANS, help="what to time beside Gloo's own")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def build_network(hosts: int, mbit: int) -> None:
    """One bridge, one namespace per host; both ends of each cable are limited."""
    call(f"ip link add {BRIDGE} type bridge")
    call(f"ip addr add {NETWORK}.1/24 dev {BRIDGE}")
    call(f"ip link set {BRIDGE} up")
    limit = f"tbf rate {mbit}mbit burst 64kb limit 1mb"
    for host in range(hosts):
        name, port = f"ap-host{host}", f"ap-port{host}"
        call(f"ip netns add {name}")
        call(f"ip link add {port} type veth peer name eth0 netns {name}")
        call(f"ip link set {port} master {BRIDGE} up")
        call(f"ip -n {name} addr add {NETWORK}.{10 + host}/24 dev eth0")
        call(f"ip -n {name} link set lo up")
        call(f"ip -n {name} link set eth0 up")
        call(f"tc qdisc add dev {port} root {limit}")
        call(f"ip netns exec {name} tc qdisc add dev eth0 root {limit}")


def remove_network(hosts: int) -> None:
    """Undo `build_network`, as far as it got."""
    for host in range(hosts):
        call(f"ip netns del ap-host{host}", check=False)
    call(f"ip link del {BRIDGE}", check=False)


def call(words: str, *, check: bool = True) -> None:
    """Run one command, quietly where its failure does not matter."""
    errors = None if check else subprocess.DEVNULL
    subprocess.run(words.split(), check=check, stderr=errors)


def work(options: argparse.Namespace) -> None:
    """One worker: time everything in turn; worker 0 prints."""
    torch.set_num_threads(1)
    rank, hosts = options.rank, options.hosts
    world_size = hosts * options.workers_per_host
    store = TCPStore(f"{NETWORK}.1", options.port, is_master=False)
    nodes = tuple(f"host{each // options.workers_per_host}" for each in range(world_size))
    limit = timedelta(minutes=5)
    raw: Any = dist.ProcessGroupGloo(PrefixStore("raw", store), rank, world_size, limit)
    variants = variants_of(ReducerConfig)
    reducers = {
        kind: Reducer(
            variants[kind](kind=kind, timeout_seconds=300.0),
            Membership(store, rank, world_size, generation, nodes),
        )
        for generation, kind in enumerate(options.plans)
    }
    if rank == 0:
        rate = f"{options.mbit} Mbit/s"
        print(f"{hosts} hosts x {options.workers_per_host} workers, {rate}, medians", flush=True)
        print("| MB | what | seconds | over bound | over raw |\n|---|---|---|---|---|", flush=True)
    for megabytes in options.mb:
        buffer = torch.ones(int(megabytes * 1e6) // 4)
        acts = {"raw Gloo": lambda: raw.allreduce([buffer]).wait()}  # noqa: B023
        for kind, reducer in reducers.items():
            acts[kind] = lambda reducer=reducer: reducer.start(buffer).wait()  # noqa: B023
        seconds: dict[str, list[float]] = {name: [] for name in acts}
        for _ in range(options.repeats):
            for name, act in acts.items():
                buffer.fill_(1.0)
                raw.barrier().wait()
                began = time.perf_counter()
                act()
                seconds[name].append(time.perf_counter() - began)
                assert buffer[0] == world_size
                assert buffer[-1] == world_size
        slowest = dist_max(raw, seconds, world_size)
        bound = 2 * (hosts - 1) / hosts * megabytes * 8 / options.mbit
        if rank == 0:
            for name, value in slowest.items():
                over = value / slowest["raw Gloo"]
                print(
                    f"| {megabytes:g} | {name} | {value:.3f} | {value / bound:.2f} | {over:.2f} |"
                )
    for reducer in reducers.values():
        reducer.close()
    raw.barrier().wait()


def dist_max(raw: Any, seconds: dict[str, list[float]], world_size: int) -> dict[str, float]:
    """Median over the repeats of the slowest worker's time."""
    mine = torch.tensor(list(seconds.values()), dtype=torch.float64)
    everyones = [torch.empty_like(mine) for _ in range(world_size)]
    raw.allgather([everyones], [mine]).wait()
    slowest = torch.stack(everyones).amax(dim=0)
    medians = [statistics.median(row) for row in slowest.tolist()]
    return dict(zip(seconds, medians, strict=True))


if __name__ == "__main__":
    main()
