"""One worker's samples, step by step: its share of a slice, decoded, cut into micro-batches."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from adaptive_platform.data.broken import BrokenSample
from adaptive_platform.data.decoding import Decoder
from adaptive_platform.data.look_ahead import LookAhead
from adaptive_platform.data.microbatch import MicroBatch
from adaptive_platform.data.order import EpochOrders
from adaptive_platform.data.samples import Samples
from adaptive_platform.data.shares import dealt, microbatch_sizes, positions_of
from adaptive_platform.data.sources import DataConfig
from adaptive_platform.errors import DataError

__all__ = ["SampleStream", "Share"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one worker trains on in one step."""

    microbatches: list[MicroBatch]
    """Possibly none: where there are fewer samples than workers, or all of them are broken."""
    broken: list[BrokenSample]
    """Samples of this share that could not be read and were left out."""
    left_out: Tensor
    """Ids of readable samples left out because broken ones left fewer than the smallest
    micro-batch; int64, at most minimum - 1."""
    wait_seconds: float
    """Time the step waited for its data."""
    cached_bytes: int = 0
    """Encoded images that this worker holds in memory, where there is a cache."""

    def __len__(self) -> int:
        return sum(len(microbatch) for microbatch in self.microbatches)


class SampleStream:
    """Cuts slices of the global order into this worker's micro-batches.

    What it returns is a function of its arguments and of those of `take`; decoding ahead changes
    when work is done and nothing else. Make a new stream when rank or world size change.

    Args:
        samples: The training set.
        config: Transform, decode processes and the policy for broken samples.
        seed: Seed of the run, for order and augmentation.
        rank: This worker, in [0, world_size).
        world_size: Number of workers.
    """

    def __init__(
        self, samples: Samples, config: DataConfig, seed: int, rank: int, world_size: int
    ) -> None:
        self._samples = samples
        self._config = config
        self._rank = rank
        self._world_size = world_size
        self._orders = EpochOrders(seed, len(samples))
        self._decoder = Decoder(samples, config, seed, training=True)
        self._look_ahead: LookAhead | None = None
        if config.decode_workers > 0:
            self._look_ahead = LookAhead(self._decoder, self._orders, config, rank, world_size)

    def take(
        self,
        epoch: int,
        cursor: int,
        count: int,
        minimum: int,
        microbatch: int,
        at_least: int = 1,
        deal: tuple[int, ...] | None = None,
    ) -> Share:
        """This worker's part of positions [cursor, cursor + count) of the epoch's order.

        Args:
            epoch: Number of the epoch.
            cursor: Positions behind us.
            count: Positions that the step takes over all workers; see `shares.next_slice`.
            minimum: Smallest micro-batch the model can train on.
            microbatch: Largest micro-batch that fits the device.
            at_least: Micro-batches wanted where the share is large enough.
            deal: Who takes which position, see `shares.deal_of`; all workers alike where None.

        Raises:
            DataError: A sample is broken and the policy is to stop, or shapes differ.
            RunFailedError: The decode processes failed.
        """
        started = time.perf_counter()
        end = cursor + count
        positions = positions_of(self._rank, self._world_size, cursor, count, minimum, deal)
        if self._look_ahead is not None:
            self._look_ahead.follow(deal or tuple(range(self._world_size)))
            decoded = self._look_ahead.collect(epoch, positions, end)
        else:
            decoded = self._decoder(epoch, self._orders[epoch][positions])
        stop_at_broken(decoded.broken, self._config)
        usable = len(decoded.ids)
        if usable < minimum:
            usable = 0
        batches = []
        start = 0
        sizes = microbatch_sizes(usable, microbatch, minimum, at_least)
        if len(sizes) > 1:
            decoded = decoded.reordered(dealt(usable, len(sizes)), usable)
        for size in sizes:
            batches.append(self._decoder.batch(decoded, start, start + size))
            start += size
        return Share(
            microbatches=batches,
            broken=decoded.broken,
            left_out=torch.from_numpy(decoded.ids[usable:].astype(np.int64)),
            wait_seconds=time.perf_counter() - started,
            cached_bytes=self._samples.held_bytes,
        )

    def close(self) -> None:
        """End the decode processes; the stream can't be used afterwards."""
        if self._look_ahead is not None:
            self._look_ahead.close()


def stop_at_broken(broken: list[BrokenSample], config: DataConfig) -> None:
    """Apply the policy `broken: stop`.

    Raises:
        DataError: The policy is to stop and there is a broken sample.
    """
    if broken and config.broken == "stop":
        raise DataError(
            f"data: can't read {broken[0]}. Mend or remove it, or set data.broken=skip."
        )
