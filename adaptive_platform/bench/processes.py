"""A group of fresh local processes that meet at a store: the stage of every benchmark."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from adaptive_platform.collectives import Membership
from adaptive_platform.errors import RunFailedError

__all__ = ["run_group"]


def run_group(
    world_size: int,
    body: Callable[..., Any],
    *args: Any,
    timeout_seconds: float = 1800.0,
    fresh: bool = True,
) -> list[Any]:
    """Call `body(membership, *args)` in `world_size` processes of one thread each.

    Args:
        world_size: Number of processes.
        body: What each does; importable by its name.
        args: Handed to it.
        timeout_seconds: For all of them together.
        fresh: Each process imports everything itself and so owns all of its memory. If not, they
            are forked from one that has imported it, which makes dozens of them affordable.

    Returns:
        What each returned, by rank.

    Raises:
        RunFailedError: A process failed or did not come back in time.
    """
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    get_context = multiprocessing.get_context
    context = get_context("spawn") if fresh else get_context("forkserver")
    if not fresh:
        context.set_forkserver_preload(_preloaded(body.__module__))
    pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
    processes = [
        context.Process(
            target=_work, args=(rank, world_size, server.port, sender, body, args), daemon=True
        )
        for rank, (_, sender) in enumerate(pipes)
    ]
    for process, (_, sender) in zip(processes, pipes, strict=True):
        process.start()
        sender.close()  # the process has its own: when that closes, the pipe has ended
    try:
        return _collect([receiver for receiver, _ in pipes], timeout_seconds)
    finally:
        for process in processes:
            process.kill()


def _preloaded(module: str) -> list[str]:
    """What the processes find imported already.

    Each imports the main module of whoever starts it. That costs half a second of processor time,
    dozens of times over, unless all that it imports is there.
    """
    package = __name__.partition(".")[0]
    loaded = [name for name in sys.modules if name.partition(".")[0] == package]
    return [module, *(name for name in loaded if name != module)]


def _collect(receivers: list[Connection], timeout_seconds: float) -> list[Any]:
    deadline = time.monotonic() + timeout_seconds
    found: dict[int, Any] = {}
    while len(found) < len(receivers):
        missing = [each for rank, each in enumerate(receivers) if rank not in found]
        ready = wait(missing, max(0.0, deadline - time.monotonic()))
        if not ready:
            ranks = sorted(set(range(len(receivers))) - set(found))
            raise RunFailedError(f"benchmark processes {ranks} took over {timeout_seconds:g} s.")
        for each in ready:
            rank = receivers.index(each)  # type: ignore[arg-type]
            try:
                ok, value = receivers[rank].recv()
            except EOFError:
                raise RunFailedError(f"benchmark process {rank} ended without a result.") from None
            if not ok:
                raise RunFailedError(f"benchmark process {rank} failed:\n{value}")
            found[rank] = value
    return [found[rank] for rank in range(len(receivers))]


def _work(
    rank: int,
    world_size: int,
    port: int,
    sender: Connection,
    body: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    # Whoever ends the benchmark must not leave dozens of busy processes behind.
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    try:
        store = TCPStore("127.0.0.1", port, is_master=False)
        sender.send((True, body(Membership(store, rank, world_size), *args)))
    except BaseException:
        sender.send((False, traceback.format_exc()))


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
