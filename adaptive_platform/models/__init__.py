"""Networks by name, built the same on every worker, and what batch normalization needs of us."""

from __future__ import annotations

from adaptive_platform.models.config import ModelConfig
from adaptive_platform.models.normalization import (
    average_normalization,
    is_convolutional,
    normalization_buffers,
    smallest_microbatch,
)

__all__ = [
    "ModelConfig",
    "average_normalization",
    "is_convolutional",
    "normalization_buffers",
    "smallest_microbatch",
]
