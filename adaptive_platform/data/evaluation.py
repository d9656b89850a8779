"""Held-out samples, each exactly once over all workers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from adaptive_platform.data.broken import BrokenSample
from adaptive_platform.data.decoding import Decoder
from adaptive_platform.data.look_ahead import Chunk, DecodeProcesses
from adaptive_platform.data.microbatch import MicroBatch
from adaptive_platform.data.samples import Samples
from adaptive_platform.data.sources import DataConfig
from adaptive_platform.data.stream import stop_at_broken

__all__ = ["EvaluationBatches", "evaluation_batches"]


class EvaluationBatches:
    """One pass over a worker's held-out samples; iterate once, then read `broken`."""

    def __init__(
        self, samples: Samples, config: DataConfig, rank: int, world_size: int, batch: int
    ) -> None:
        self._decoder = Decoder(samples, config, seed=0, training=False)
        self._config = config
        self._ids = np.arange(rank, len(samples), world_size, dtype=np.int64)
        self._batch = batch
        self.broken: list[BrokenSample] = []
        """Samples left out so far; a score covers the rest only."""

    def __iter__(self) -> Iterator[MicroBatch]:
        processes = None
        if self._config.decode_workers > 0:
            processes = DecodeProcesses(self._decoder, self._chunks(), self._config)
            results = (decoded for _, decoded in processes)
        else:
            results = (self._decoder(chunk.epoch, chunk.ids) for chunk in self._chunks())
        try:
            for decoded in results:
                stop_at_broken(decoded.broken, self._config)
                self.broken += decoded.broken
                if len(decoded.ids):
                    yield self._decoder.batch(decoded, 0, len(decoded.ids))
        finally:
            if processes is not None:
                processes.close()

    def _chunks(self) -> Iterator[Chunk]:
        for start in range(0, len(self._ids), self._batch):
            ids = self._ids[start : start + self._batch]
            yield Chunk(0, ids, ids)


def evaluation_batches(
    samples: Samples, config: DataConfig, rank: int, world_size: int, batch: int
) -> EvaluationBatches:
    """This worker's part of an evaluation: samples `i` with `i % world_size == rank`.

    Nothing is padded or dropped, so the last batch is short and workers may have one batch more
    than others: add up sums and counts over workers after the pass, not batch by batch.

    Args:
        samples: The held-out set.
        config: Transform, without augmentation, and the policy for broken samples.
        rank: This worker.
        world_size: Number of workers.
        batch: Samples per batch.

    Returns:
        An iterable of micro-batches; its `broken` lists what could not be read.
    """
    return EvaluationBatches(samples, config, rank, world_size, batch)
