"""A batch that follows the gradient noise scale (McCandlish et al. 2018, arXiv 1812.06162)."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from adaptive_platform.controllers.adaptive import AdaptiveConfig, AdaptiveController, Target
from adaptive_platform.controllers.controller import Need, Observation

__all__ = ["NoiseScale", "NoiseScaleConfig"]


class NoiseScaleConfig(AdaptiveConfig):
    """Aim for a share of the noise scale, the batch at which noise equals signal."""

    kind: Literal["noise_scale"] = "noise_scale"
    needs: ClassVar[frozenset[Need]] = frozenset({"noise"})
    scale_factor: float = Field(default=1.0, gt=0.0)
    """Target batch as a multiple of the noise scale. At 1, steps and samples to a goal are both
    twice their least; below 1 saves samples, above 1 saves steps."""

    def build(self) -> NoiseScale:
        """A controller that has seen nothing."""
        return NoiseScale(self)


class NoiseScale(AdaptiveController):
    """Holds while the noise hides the signal: then the noise scale has no value to follow."""

    def __init__(self, config: NoiseScaleConfig) -> None:
        super().__init__(config)
        self._scale_factor = config.scale_factor

    def target(self, observation: Observation) -> Target:
        """See `AdaptiveController.target`."""
        summary = observation.summary
        inputs = {
            "noise_trace": summary.noise_trace,
            "signal_sqnorm": summary.signal_sqnorm,
            "noise_scale": summary.noise_scale,
            "observations": summary.observations,
        }
        if summary.noise_scale is None:
            return Target(batch=None, why="noise hides the signal, hold", inputs=inputs)
        why = f"noise scale {summary.noise_scale:.4g}"
        if self._scale_factor != 1.0:
            why += f" x {self._scale_factor:g}"
        return Target(batch=self._scale_factor * summary.noise_scale, why=why, inputs=inputs)
