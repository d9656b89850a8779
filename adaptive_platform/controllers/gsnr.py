"""A batch that keeps the layers' gradient signal-to-noise ratio at a target."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from adaptive_platform.controllers.adaptive import AdaptiveConfig, AdaptiveController, Target
from adaptive_platform.controllers.controller import Need, Observation

__all__ = ["Gsnr", "GsnrConfig"]


class GsnrConfig(AdaptiveConfig):
    """Aim for a GSNR of the layers, each counting once however large its gradient is.

    Unlike the noise scale, a few layers with large gradients do not decide. Needs layers to be
    measured; it holds while they are not.
    """

    kind: Literal["gsnr"] = "gsnr"
    needs: ClassVar[frozenset[Need]] = frozenset({"layers"})
    target_gsnr: float = Field(default=1.0, gt=0.0)
    """Wanted `B * G2_l / S_l` of the median layer: squared signal over the variance that is left
    in the mean gradient of a batch B. At 1 both are equal."""

    def build(self) -> Gsnr:
        """A controller that has seen nothing."""
        return Gsnr(self)


class Gsnr(AdaptiveController):
    """GSNR is proportional to the batch, so the target batch is `target / GSNR of one sample`."""

    def __init__(self, config: GsnrConfig) -> None:
        super().__init__(config)
        self._target_gsnr = config.target_gsnr

    def target(self, observation: Observation) -> Target:
        """See `AdaptiveController.target`."""
        of_one = observation.summary.gsnr
        now = None if of_one is None else of_one * observation.global_batch
        inputs = {
            "gsnr": now,
            "gsnr_of_one_sample": of_one,
            "target_gsnr": self._target_gsnr,
            "observations": observation.summary.observations,
        }
        if of_one is None:
            return Target(batch=None, why="no layer has a measured GSNR, hold", inputs=inputs)
        if of_one <= 0.0:
            return Target(batch=None, why="noise hides most layers' signal, hold", inputs=inputs)
        why = f"GSNR of the layers {now:.3g}, target {self._target_gsnr:g}"
        return Target(batch=self._target_gsnr / of_one, why=why, inputs=inputs)
