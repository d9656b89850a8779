"""How the workers of one attempt find each other: a store on rank 0, named through Ray."""

from __future__ import annotations

import datetime
import os
import pickle
import socket
import uuid

import ray
import torch
from ray.train.collective import broadcast_from_rank_zero
from torch import distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from adaptive_platform.collectives import Membership
from adaptive_platform.errors import RunFailedError

__all__ = ["alone", "connect_store", "device_of_worker", "meet", "serve_store", "vote"]


def meet(timeout_seconds: float) -> tuple[Membership, str]:
    """Join the other workers of this Ray Train worker group.

    Outside Ray Train, an initialized `torch.distributed` serves, and without it one is alone.

    Returns:
        The workers, and a name for this attempt that is the same on all of them.

    Raises:
        RunFailedError: The others did not come within the timeout.
    """
    try:
        context = ray.train.get_context()
        rank, world_size = context.get_world_rank(), context.get_world_size()
    except RuntimeError:
        return _from_torch(), ""
    host = ray.util.get_node_ip_address()
    store, port = None, 0
    if rank == 0:
        store = serve_store(host, timeout_seconds)
        port = store.port
    host, port, attempt = broadcast_from_rank_zero((host, port, uuid.uuid4().hex[:8]))
    if store is None:
        store = connect_store(host, port, timeout_seconds)
    node = ray.get_runtime_context().get_node_id()
    return _membership(store, rank, world_size, node), attempt


def vote(membership: Membership, error: Exception | None) -> None:
    """Before there is a reducer: raise the error of the lowest rank that has one, on all workers.

    Raises:
        UserError: What the first worker that failed said.
    """
    if membership.world_size == 1:
        if error is not None:
            raise error
        return
    store = PrefixStore("vote", membership.store)
    store.set(str(membership.rank), pickle.dumps(error).hex())
    for rank in range(membership.world_size):
        found = pickle.loads(bytes.fromhex(store.get(str(rank)).decode()))
        if found is not None:
            raise found


def alone() -> Membership:
    """A group of one."""
    return Membership(store=HashStore(), rank=0, world_size=1, generation=0, node_of_rank=("here",))


def _from_torch() -> Membership:
    if not dist.is_initialized():
        return alone()
    default = dist.distributed_c10d._get_default_store()
    # Counted per rank, so that a second run in one process group finds keys of its own.
    use = default.add(f"adaptive_platform/uses/{dist.get_rank()}", 1)
    store = PrefixStore(f"adaptive_platform/{use}", default)
    return _membership(store, dist.get_rank(), dist.get_world_size(), socket.gethostname())


def _membership(store: Store, rank: int, world_size: int, node: str) -> Membership:
    store.set(f"node/{rank}", node)
    try:
        nodes = tuple(store.get(f"node/{r}").decode() for r in range(world_size))
    except (RuntimeError, dist.DistStoreError) as error:
        raise RunFailedError(f"workers did not meet: {error}") from error
    return Membership(
        store=store, rank=rank, world_size=world_size, generation=0, node_of_rank=nodes
    )


def serve_store(host: str, timeout_seconds: float) -> TCPStore:
    """A store in this process, at any free port of `host`."""
    return TCPStore(
        host, 0, is_master=True, wait_for_workers=False, timeout=_delta(timeout_seconds)
    )


def connect_store(host: str, port: int, timeout_seconds: float) -> TCPStore:
    """A client of the store that another worker serves."""
    return TCPStore(host, port, is_master=False, timeout=_delta(timeout_seconds))


def _delta(seconds: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=seconds)


def device_of_worker() -> torch.device:
    """The GPU that Ray gave this worker, else the CPU.

    Ray Train's own function answers its own workers alone; those that join later are plain actors.

    Raises:
        RunFailedError: CUDA_VISIBLE_DEVICES does not name that GPU.
    """
    given = [str(gpu) for gpu in ray.get_gpu_ids()]
    if not torch.cuda.is_available() or not given:
        return torch.device("cpu")
    # Ray Train shows a worker all GPUs of its node's workers, an actor sees its own only.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if given[0] not in visible:
        raise RunFailedError(
            f"CUDA_VISIBLE_DEVICES = {','.join(visible)}: Ray gave this worker GPU {given[0]}, "
            "which is not among them. Leave the variable to Ray."
        )
    return torch.device("cuda", visible.index(given[0]))
