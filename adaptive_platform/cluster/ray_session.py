"""Ray itself: started here or joined, and what a run asks of it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray

from adaptive_platform.errors import UserError
from adaptive_platform.recipe import Recipe

__all__ = ["RaySession", "is_local", "probe", "ray_session", "resources_for", "workers_wanted"]

_OBJECT_STORE_BYTES = 256 * 2**20
_PROBE_SECONDS = 5.0
_NEVER_SECONDS = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySession:
    """A connection to Ray."""

    local: bool
    """True when this process started Ray for itself."""
    logs: str
    """Folder with Ray's own log files, on the driver's node."""
    resources: dict[str, float]
    """What the whole cluster has."""


@contextmanager
def ray_session(recipe: Recipe) -> Iterator[RaySession]:
    """Ray for the length of a run.

    The recipe's `address` is joined, or else RAY_ADDRESS, which `ray job submit` sets; otherwise a
    local Ray is started and ended again. A Ray that this process already uses is left as it is.

    Raises:
        UserError: No cluster answers at the address, or this process already uses another one.
    """
    # Ray Train polls its workers this often: half a second bounds the wait at the end of a run.
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")
    if recipe.is_live:
        # Ray Train would start all workers again when a node drains; here its workers leave.
        os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
    if ray.is_initialized():
        if recipe.address:
            probe(recipe.address)
            _check_is_ours(recipe.address)
        yield _session(local=False)
        return
    address, local = _address(recipe), is_local(recipe)
    settings: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if local:
        # Nobody announces a preemption to a machine's own Ray; the watcher is one process more.
        os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
        settings |= {
            "include_dashboard": False,
            "num_cpus": max(os.cpu_count() or 1, _most(recipe.workers)),
            "object_store_memory": _OBJECT_STORE_BYTES,
        }
    probe(address)
    try:
        ray.init(address=address, **settings)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UserError(
            f"address = {address}: no Ray cluster could be joined there "
            f"({str(error).splitlines()[0]}). Start one with `ray start --head`, or leave "
            "`address` away for a local one."
        ) from None
    try:
        yield _session(local=local)
    finally:
        ray.shutdown()


def probe(address: str) -> None:
    """Refuse at once an address where nobody answers: Ray itself would wait for minutes.

    Raises:
        UserError: No connection within a few seconds.
    """
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdigit():
        return  # `local`, `auto`, or a name that Ray resolves.
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_SECONDS).close()
    except OSError as error:
        raise UserError(
            f"address = {address}: nobody answers there ({error}). Start a cluster with `ray start "
            "--head`, or leave `address` away for a local one."
        ) from None


def _check_is_ours(address: str) -> None:
    """Refuse an address beside the Ray that this process uses: a process has one Ray at a time."""
    ours_host, _, ours_port = ray.get_runtime_context().gcs_address.rpartition(":")
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdigit():
        return  # `local`, `auto`, or a name that Ray resolves: what is there will do.
    same_host = socket.gethostbyname(host.strip("[]")) in {
        socket.gethostbyname(ours_host),
        "127.0.0.1",
    }
    if port != ours_port or not same_host:
        raise UserError(
            f"address = {address}: this process already uses the Ray at {ours_host}:{ours_port}. "
            "Leave `address` away to run there, or call ray.shutdown() first."
        )


def is_local(recipe: Recipe) -> bool:
    """True when the run will start a Ray of its own on this machine."""
    return _address(recipe) == "local"


def workers_wanted(recipe: Recipe, resources: dict[str, float]) -> tuple[int, int]:
    """Smallest and largest number of workers: the recipe's, else every GPU, else 2 on CPUs."""
    if isinstance(recipe.workers, tuple):
        return recipe.workers
    number = recipe.workers or int(resources.get("GPU", 0)) or 2
    return number, number


def resources_for(recipe: Recipe, session: RaySession) -> Any:
    """Ray Train's scaling configuration for the run.

    Raises:
        UserError: The cluster has less than the smallest number of workers needs.
    """
    from ray.train import ScalingConfig

    low, high = workers_wanted(recipe, session.resources)
    use_gpu = session.resources.get("GPU", 0) >= 1
    for resource in ("CPU", "GPU") if use_gpu else ("CPU",):
        have = session.resources.get(resource, 0)
        if have < low:
            raise UserError(
                f"workers = {low}: they need {low} {resource}, the cluster has {have:g}. Ask for "
                "fewer workers or add nodes."
            )
    if low != high and recipe.is_live:
        # The number follows the cluster without Ray Train, which would start all workers again.
        limits = {"elastic_resize_monitor_interval_s": _NEVER_SECONDS}
    else:
        limits = {}
    return ScalingConfig(
        **limits,
        num_workers=low if low == high else (low, high),
        use_gpu=use_gpu,
        resources_per_worker={"CPU": 1, "GPU": 1} if use_gpu else {"CPU": 1},
    )


def _address(recipe: Recipe) -> str:
    return recipe.address or os.environ.get("RAY_ADDRESS") or "local"


def _session(*, local: bool) -> RaySession:
    node = ray._private.worker.global_worker.node
    return RaySession(
        local=local,
        logs=node.get_logs_dir_path() if node is not None else "",
        resources=ray.cluster_resources(),
    )


def _most(workers: int | tuple[int, int] | None) -> int:
    return workers[1] if isinstance(workers, tuple) else workers or 2
