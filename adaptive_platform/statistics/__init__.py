"""Estimators: squared norms and counts in, GradientSummary out."""

from __future__ import annotations

from adaptive_platform.statistics.moments import DifferencedMoments, StepMoments
from adaptive_platform.statistics.noise_scale import NoiseScaleEstimator, StatisticsConfig
from adaptive_platform.statistics.stragglers import Straggler, Stragglers
from adaptive_platform.statistics.variance_reduction import (
    VarianceReduction,
    VarianceReductionConfig,
)

__all__ = [
    "DifferencedMoments",
    "NoiseScaleEstimator",
    "StatisticsConfig",
    "StepMoments",
    "Straggler",
    "Stragglers",
    "VarianceReduction",
    "VarianceReductionConfig",
]
