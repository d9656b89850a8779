"""Latency and bandwidth between the workers of a Ray cluster, measured where they will run."""

from __future__ import annotations

from typing import Any

import ray
from torch._C._distributed_c10d import TCPStore

from adaptive_platform.cluster.ray_session import ray_session
from adaptive_platform.cluster.rendezvous import device_of_worker
from adaptive_platform.collectives import Links, Membership, measure_links
from adaptive_platform.errors import UserError
from adaptive_platform.recipe import load_recipe

__all__ = ["cluster_links"]


def cluster_links(address: str, workers: int) -> Links:
    """Measure the links of `workers` workers spread over a cluster, as a run would be.

    One worker per GPU where the cluster has any, and then between the GPUs.

    Args:
        address: Of the cluster, such as `auto`.
        workers: Their number, at least 2.

    Raises:
        UserError: Nobody answers there, or the cluster has too little for that many workers.
    """
    if workers < 2:
        raise UserError(f"--workers = {workers}: links need at least 2 workers.")
    recipe = load_recipe("quickstart", [f"address={address}", f"workers={workers}"])
    with ray_session(recipe) as session:
        kind = "GPU" if session.resources.get("GPU", 0) >= workers else "CPU"
        have = session.resources.get(kind, 0)
        if have < workers:
            raise UserError(
                f"--workers = {workers}: the cluster has {have:g} {kind}s. Ask for fewer."
            )
        options = {"num_cpus": 1, "num_gpus": int(kind == "GPU"), "scheduling_strategy": "SPREAD"}
        actor: Any = ray.remote(_Worker).options(**options)
        members = [actor.remote() for _ in range(workers)]
        nodes = tuple(ray.get([member.node.remote() for member in members]))
        host, port = ray.get(members[0].serve.remote())
        found = ray.get(
            [m.measure.remote(host, port, rank, nodes) for rank, m in enumerate(members)]
        )
        for member in members:
            ray.kill(member)
    return found[0]


class _Worker:
    """One worker; an actor."""

    def __init__(self) -> None:
        self._server: TCPStore | None = None

    def node(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    def serve(self) -> tuple[str, int]:
        host = ray.util.get_node_ip_address()
        self._server = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return host, self._server.port

    def measure(self, host: str, port: int, rank: int, nodes: tuple[str, ...]) -> Links:
        store = TCPStore(host, port, is_master=False)
        return measure_links(Membership(store, rank, len(nodes), 0, nodes), device_of_worker())
