"""Networks by name, built the same on every worker, and what batch normalization needs of us."""

from __future__ import annotations

from adaptive_platform.models.config import ModelConfig
from adaptive_platform.models.evaluation_statistics import recompute_statistics
from adaptive_platform.models.modes import TrainingMode, in_eval_mode
from adaptive_platform.models.normalization import (
    average_normalization,
    is_convolutional,
    normalization_buffers,
    smallest_microbatch,
)
from adaptive_platform.models.normalization_policy import (
    GhostNorm,
    GroupNorm,
    LocalNorm,
    NormalizationPolicy,
)

__all__ = [
    "GhostNorm",
    "GroupNorm",
    "LocalNorm",
    "ModelConfig",
    "NormalizationPolicy",
    "TrainingMode",
    "average_normalization",
    "in_eval_mode",
    "is_convolutional",
    "normalization_buffers",
    "recompute_statistics",
    "smallest_microbatch",
]
