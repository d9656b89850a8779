"""Estimators: squared norms and counts in, GradientSummary out; and as functions, for any loop."""

from __future__ import annotations

from adaptive_platform.statistics.gsnr import (
    elementwise_gsnr,
    gsnr_reduced_gradient,
    reduction_ratio,
)
from adaptive_platform.statistics.hessian import (
    hessian_vector_product,
    lanczos,
    power_iteration,
)
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
    "elementwise_gsnr",
    "gsnr_reduced_gradient",
    "hessian_vector_product",
    "lanczos",
    "power_iteration",
    "reduction_ratio",
]
