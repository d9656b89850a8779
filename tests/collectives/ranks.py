"""Runs one function as several workers: as threads (cheap), or as processes that can be killed."""

from __future__ import annotations

import multiprocessing as mp
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import HashStore, Store, TCPStore

from adaptive_platform.collectives import Membership, Reducer, ReducerConfig

T = TypeVar("T")


def as_threads(world_size: int, body: Callable[[int], T], seconds: float = 200.0) -> list[T]:
    """`body(rank)` on one thread per rank; the results by rank, or the first error."""
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def call(rank: int) -> None:
        try:
            results[rank] = body(rank)
        except BaseException as error:
            errors[rank] = error

    threads = [
        threading.Thread(target=call, args=(rank,), daemon=True) for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    if errors:
        raise errors[min(errors)]
    assert len(results) == world_size, f"ranks {sorted(set(range(world_size)) - set(results))} hang"
    return [results[rank] for rank in range(world_size)]


def with_reducers(
    config: ReducerConfig,
    world_size: int,
    body: Callable[[Reducer], T],
    *,
    store: Store | None = None,
    generation: int = 0,
    nodes: tuple[str, ...] | None = None,
) -> list[T]:
    """`body(reducer)` on one thread per rank, every rank with its own reducer."""
    shared = store if store is not None else HashStore()

    def run(rank: int) -> T:
        membership = Membership(shared, rank, world_size, generation, nodes)
        with Reducer(config, membership) as reducer:
            return body(reducer)

    return as_threads(world_size, run)


def as_processes(
    world_size: int,
    body: Callable[..., None],
    *args: Any,
    on_start: Callable[[list[mp.process.BaseProcess]], None] | None = None,
    seconds: float = 60.0,
) -> dict[int, Any]:
    """`body(rank, world_size, port, queue, *args)` in spawned processes; what each put last.

    Rank r of those that put nothing is absent. Processes left over are ended.
    """
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = mp.get_context("spawn")
    queues = [context.SimpleQueue() for _ in range(world_size)]
    processes = [
        context.Process(target=body, args=(rank, world_size, server.port, queues[rank], *args))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    try:
        if on_start is not None:
            on_start(processes)
        for process in processes:
            process.join(seconds)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
    found: dict[int, Any] = {}
    for rank, queue in enumerate(queues):
        while not queue.empty():
            found[rank] = queue.get()
    return found


def tcp_store(port: int, seconds: float = 30.0) -> TCPStore:
    """A client of the store that `as_processes` serves."""
    return TCPStore("127.0.0.1", port, timeout=timedelta(seconds=seconds))
