"""Decode processes that work ahead along one worker's own stream of samples."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from adaptive_platform.data.decoding import Decoded, Decoder
from adaptive_platform.data.order import EpochOrders
from adaptive_platform.data.shares import owned
from adaptive_platform.data.sources import DataConfig
from adaptive_platform.errors import RunFailedError

__all__ = ["CHUNK", "Chunk", "DecodeProcesses", "LookAhead"]

CHUNK = 16
"""Samples decoded per hand-over: enough to hide its cost, few enough to start a step early."""


_POLL_SECONDS = 2.0
"""The loader notices a dead process only when such a wait ends."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Samples that one decode process reads in one go."""

    epoch: int
    positions: NDArray[np.int64]
    ids: NDArray[np.int64]


class DecodeProcesses:
    """Processes that decode chunks, delivered in order.

    Args:
        decoder: What they run.
        chunks: What to decode; read lazily, so it may be endless.
        config: Number of processes, how far ahead, and the longest wait.
    """

    def __init__(self, decoder: Decoder, chunks: Iterable[Chunk], config: DataConfig) -> None:
        self._timeout = config.decode_timeout_seconds
        self._results: Iterator[tuple[Chunk, Decoded]] | None = iter(
            DataLoader(
                _ChunkSet(decoder),
                sampler=chunks,
                batch_size=None,
                collate_fn=_unchanged,
                num_workers=config.decode_workers,
                prefetch_factor=config.prefetch,
                timeout=min(_POLL_SECONDS, config.decode_timeout_seconds),
                worker_init_fn=_leave_signals_to_the_parent,
                # Without its own generator the loader draws from the default one, and a resumed
                # run would no longer equal an uninterrupted one.
                generator=torch.Generator(),
            )
        )

    def __next__(self) -> tuple[Chunk, Decoded]:
        """The next chunk.

        Raises:
            RunFailedError: A process died, or nothing came within the longest wait.
        """
        if self._results is None:
            raise StopIteration
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                return next(self._results)
            except (RuntimeError, OSError, EOFError) as error:
                # A process that dies while it hands tensors over shows as a broken connection.
                broken = not isinstance(error, RuntimeError)
                if not broken and not str(error).startswith("DataLoader"):
                    raise
                late = str(error).startswith("DataLoader timed out")
                if late and time.monotonic() < deadline:
                    continue
                reason = f"nothing came for {self._timeout:g} s" if late else str(error)
                if broken:
                    reason = f"DataLoader worker ended while it sent samples ({error})"
                raise RunFailedError(
                    f"data: the decode processes failed: {reason}. They may have run out of "
                    "memory: lower data.decode_workers or data.prefetch; or storage was slow: "
                    "raise data.decode_timeout_seconds."
                ) from error

    def __iter__(self) -> DecodeProcesses:
        return self

    def close(self) -> None:
        """End the processes."""
        self._results = None  # the loader's iterator joins them when its last reference goes


class LookAhead:
    """Decodes ahead along the positions `p` with `p % world_size == rank`, across epochs.

    Where shares follow the workers' speeds, along those that `deal[p % len(deal)]` gives to it.

    That stream does not depend on the batch size, so a batch change neither throws decoded samples
    away nor decodes one twice. A position off the stream is decoded on the spot; one that another
    worker took instead is dropped.
    """

    def __init__(
        self, decoder: Decoder, orders: EpochOrders, config: DataConfig, rank: int, world_size: int
    ) -> None:
        self._decoder = decoder
        self._orders = orders
        self._config = config
        self._rank = rank
        self._deal = tuple(range(world_size))
        self._processes: DecodeProcesses | None = None
        self._issued = (-1, -1)
        self._arrived = (-1, -1)
        self._ready: dict[tuple[int, int], tuple[Decoded, int]] = {}
        """By (epoch, position): a chunk's result and the row in it, -1 for a broken sample."""

    def collect(self, epoch: int, positions: NDArray[np.int64], end: int) -> Decoded:
        """Samples at `positions`, from what was decoded ahead wherever possible.

        Args:
            epoch: Epoch of the slice.
            positions: Ascending; this worker's share.
            end: Where the slice of all workers ends; what lies before it is needed no more.
        """
        order = self._orders[epoch]
        ids: list[int] = []
        inputs: list[Any] = []
        targets: list[Any] = []
        broken = []
        for position in positions.tolist():
            found = self._wait_for((epoch, position))
            if found is None:
                found = (self._decoder(epoch, order[position : position + 1]), 0)
                if found[0].broken:
                    found = (found[0], -1)
            result, row = found
            sample = int(order[position])
            if row < 0:
                broken += [known for known in result.broken if known.id == sample]
                continue
            ids.append(sample)
            inputs.append(result.inputs[row])
            targets.append(result.targets[row])
        self._ready = {key: row for key, row in self._ready.items() if key >= (epoch, end)}
        return Decoded(np.array(ids, dtype=np.int64), inputs, targets, broken)

    def follow(self, deal: tuple[int, ...]) -> None:
        """Decode along other positions from now on, where `deal` is another than before."""
        if deal != self._deal:
            self._deal = deal
            self.close()

    def close(self) -> None:
        """End the decode processes and forget what they made."""
        if self._processes is not None:
            self._processes.close()
        self._processes = None
        self._ready = {}
        self._issued = self._arrived = (-1, -1)

    def _wait_for(self, key: tuple[int, int]) -> tuple[Decoded, int] | None:
        """The row at `key`; None where the stream does not pass there or has passed already."""
        if key in self._ready:
            return self._ready.pop(key)
        is_mine = self._deal[key[1] % len(self._deal)] == self._rank
        if not is_mine or key <= self._arrived:
            return None
        if self._processes is None or key > self._issued:
            self.close()
            self._processes = DecodeProcesses(self._decoder, self._chunks(*key), self._config)
        while self._arrived < key:
            chunk, result = next(self._processes)
            self._arrived = (chunk.epoch, int(chunk.positions[-1]))
            damaged = {sample.id for sample in result.broken}
            row = 0
            for position, sample in zip(chunk.positions.tolist(), chunk.ids.tolist(), strict=True):
                self._ready[chunk.epoch, position] = (result, -1 if sample in damaged else row)
                row += sample not in damaged
        return self._ready.pop(key)

    def _chunks(self, epoch: int, first: int) -> Iterator[Chunk]:
        """Endless; runs in this process, when a decode process is free for more."""
        while True:
            order = self._orders[epoch]
            mine = owned(np.arange(first, len(order), dtype=np.int64), self._rank, self._deal)
            for start in range(0, len(mine), CHUNK):
                positions = mine[start : start + CHUNK]
                self._issued = (epoch, int(positions[-1]))
                yield Chunk(epoch, positions, order[positions])
            epoch, first = epoch + 1, 0


class _ChunkSet(Dataset[tuple[Chunk, Decoded]]):
    """Lets a `DataLoader` decode chunks: its index is the chunk itself."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def __getitem__(self, chunk: Any) -> tuple[Chunk, Decoded]:
        return chunk, self._decoder(chunk.epoch, chunk.ids)


def _unchanged(item: Any) -> Any:
    return item


def _leave_signals_to_the_parent(worker: int) -> None:
    """End when the training process says so, not when its group is signalled.

    Ctrl-C, or a scheduler's SIGTERM to the whole group, asks the training process to finish its
    step and save, for which it still needs samples. Without a parent this process ends by itself.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # not on macOS, where SIGTERM keeps ending this process
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_by_the_parent, daemon=True).start()


def _end_by_the_parent() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)
