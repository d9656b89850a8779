"""A group of fresh local processes that meet at a store: the stage of every benchmark."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from adaptive_platform.collectives import Membership
from adaptive_platform.errors import RunFailedError

__all__ = ["run_group"]


def run_group(
    world_size: int, body: Callable[..., Any], *args: Any, timeout_seconds: float = 1800.0
) -> list[Any]:
    """Call `body(membership, *args)` in `world_size` processes of one thread each.

    Returns:
        What each returned, by rank.

    Raises:
        RunFailedError: A process failed or did not come back in time.
    """
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    processes = [
        context.Process(
            target=_work, args=(rank, world_size, server.port, results, body, args), daemon=True
        )
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout_seconds)
    found: dict[int, Any] = {}
    while not results.empty():
        rank, ok, value = results.get()
        if not ok:
            raise RunFailedError(f"benchmark process {rank} failed:\n{value}")
        found[rank] = value
    for process in processes:
        if process.is_alive():
            process.kill()
    if len(found) != world_size:
        missing = sorted(set(range(world_size)) - set(found))
        raise RunFailedError(f"benchmark processes {missing} ended without a result.")
    return [found[rank] for rank in range(world_size)]


def _work(
    rank: int,
    world_size: int,
    port: int,
    results: Any,
    body: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    try:
        store = TCPStore("127.0.0.1", port, is_master=False)
        results.put((rank, True, body(Membership(store, rank, world_size), *args)))
    except BaseException:
        results.put((rank, False, traceback.format_exc()))
