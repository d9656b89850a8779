"""How the workers' copies of a model are kept together: in every step, now and then, or softly."""

from __future__ import annotations

from typing import TYPE_CHECKING

from adaptive_platform.settings import import_variants, union_of
from adaptive_platform.sync.every_step import EveryStepConfig
from adaptive_platform.sync.strategy import FlatWeights, Peers, SyncConfig, SyncStrategy

__all__ = ["AnySync", "EveryStepConfig", "FlatWeights", "Peers", "SyncConfig", "SyncStrategy"]

import_variants(__name__)

if TYPE_CHECKING:
    AnySync = SyncConfig
else:
    AnySync = union_of(SyncConfig)
    """Any way of keeping copies together, told apart by `kind`."""
