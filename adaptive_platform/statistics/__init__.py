"""Estimators: squared norms and counts in, GradientSummary out."""

from __future__ import annotations

from adaptive_platform.statistics.moments import DifferencedMoments, StepMoments
from adaptive_platform.statistics.noise_scale import NoiseScaleEstimator, StatisticsConfig

__all__ = ["DifferencedMoments", "NoiseScaleEstimator", "StatisticsConfig", "StepMoments"]
