"""From (seed, epoch, cursor) to micro-batches: readers, order, shares, augmentation, prefetch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from adaptive_platform.data.broken import BrokenLedger, BrokenSample
from adaptive_platform.data.evaluation import evaluation_batches
from adaptive_platform.data.microbatch import MicroBatch
from adaptive_platform.data.order import global_order
from adaptive_platform.data.python import PythonConfig, wrap_dataset
from adaptive_platform.data.samples import EncodedImages, Samples
from adaptive_platform.data.sharded_cache import ShardedCache
from adaptive_platform.data.shares import deal_of, dealt, microbatch_sizes, next_slice, positions_of
from adaptive_platform.data.shelf import Shelf
from adaptive_platform.data.sources import DataConfig, DataSource
from adaptive_platform.data.stream import SampleStream, Share
from adaptive_platform.settings import import_variants, union_of

__all__ = [
    "AnyData",
    "BrokenLedger",
    "BrokenSample",
    "DataConfig",
    "DataSource",
    "EncodedImages",
    "MicroBatch",
    "PythonConfig",
    "SampleStream",
    "Samples",
    "ShardedCache",
    "Share",
    "Shelf",
    "deal_of",
    "dealt",
    "evaluation_batches",
    "global_order",
    "microbatch_sizes",
    "next_slice",
    "positions_of",
    "wrap_dataset",
]

if TYPE_CHECKING:
    AnyData = DataConfig
else:
    import_variants(__name__)
    AnyData = union_of(DataConfig)
    """A field that holds the configuration of any reader."""
