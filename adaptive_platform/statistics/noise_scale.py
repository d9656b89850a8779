"""The gradient noise estimator: squared norms of each step in, smoothed S and G2 out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from adaptive_platform.settings import Settings
from adaptive_platform.statistics.averages import SampleAverages, kept
from adaptive_platform.statistics.layers import LayerAverages
from adaptive_platform.statistics.moments import DifferencedMoments, StepMoments
from adaptive_platform.summary import GradientSummary

__all__ = [
    "HALF_LIFE_BATCHES",
    "PRECONDITIONED_EVERY",
    "NoiseScaleEstimator",
    "StatisticsConfig",
]

HALF_LIFE_BATCHES = 50
"""Default half-life in batches of the first observation's size."""
PRECONDITIONED_EVERY = 5
"""Default steps between measurements through a preconditioner."""


class StatisticsConfig(Settings):
    """How gradient noise is measured and smoothed."""

    half_life_samples: int | None = Field(default=None, ge=1)
    """Samples after which an observation counts half. None: 50 times the first batch measured,
    kept for the whole run. (AdaScale's published average is about 693 base batches.)"""
    preconditioned: bool | None = None
    """Measure noise on gradients multiplied by the optimizer's preconditioner (Pollux, OSDI 2021).
    None: as published, so yes for optimizers with betas (adamw, lamb), after their first five
    steps, and no for others."""
    every: int | None = Field(default=None, ge=1)
    """Optimizer steps from one measurement to the next. Each stands for all the steps since the
    last, so the half-life keeps its meaning. None: 1, but 5 where noise is measured through a
    preconditioner, which on a CPU costs about ten times a plain norm."""
    layers: bool = True
    """Also measure each parameter's noise, which fills the column `gsnr`; its numbers come from the
    same norms. False saves their handling, where no controller needs them."""

    def build(self, *, preconditioned: bool = False) -> NoiseScaleEstimator:
        """An estimator that has seen nothing.

        Args:
            preconditioned: Noise is going to be measured through a preconditioner.
        """
        every = PRECONDITIONED_EVERY if preconditioned else 1
        return NoiseScaleEstimator(self, self.every or every)


class NoiseScaleEstimator:
    """Smooths S and G2 apart from each other and leaves every ratio to `GradientSummary`.

    Both refer to single examples, so the averages survive a new batch size and a new number of
    workers unchanged, and only the micro-batches count, not which worker ran them.

    What is not promised: examples coupled by batch norm make the estimate approximate, and unequal
    micro-batches stay unbiased but are not weighted for least variance.
    """

    def __init__(self, config: StatisticsConfig, every: int = 1) -> None:
        """Start empty; `every` as in the configuration, with its default chosen."""
        self._config = config
        self._every = every
        self._averages = SampleAverages(("noise_trace", "signal_sqnorm"))
        self._layers = LayerAverages()
        self._half_life = float(config.half_life_samples or 0)
        self._observations = 0
        self._biased = False
        self._preconditioned = False

    @property
    def has_unbiased(self) -> bool:
        """True once two or more micro-batches in a step gave averages without bias."""
        return self._observations > 0 and not self._biased

    def due(self, step: int) -> bool:
        """True when optimizer step number `step`, counted from 0, is to be measured."""
        return step % self._every == 0

    def update(self, moments: StepMoments) -> None:
        """Let one committed step in. A step that is no use changes nothing."""
        if not moments.usable:
            return
        if self._biased:
            self._start_anew()
            self._biased = False
        keep = self._add(moments)
        if moments.layer_micro_sqnorms:
            self._layers.add(
                moments.layer_micro_sqnorms,
                moments.layer_global_sqnorms,
                leverage=moments.leverage,
                global_batch=moments.global_batch,
                keep=keep,
            )

    def update_differenced(self, moments: DifferencedMoments) -> None:
        """Let two consecutive whole-batch gradients in, where a step has a single micro-batch.

        Ignored as soon as `update` has given unbiased averages, which it must not spoil; in turn
        the first `update` starts the averages anew.
        """
        if self.has_unbiased or not moments.usable:
            return
        self._biased = True
        self._add(moments)

    def _add(self, moments: StepMoments | DifferencedMoments) -> float:
        """Let a usable observation in; returns what it left of the past."""
        if moments.preconditioned != self._preconditioned:
            # Norms of `g` and of `P g` have nothing to do with each other.
            self._start_anew()
            self._preconditioned = moments.preconditioned
        if self._half_life == 0.0:
            self._half_life = float(HALF_LIFE_BATCHES * moments.global_batch)
        keep = kept(moments.global_batch * self._every, self._half_life)
        self._averages.add(
            keep, noise_trace=moments.noise_trace, signal_sqnorm=moments.signal_sqnorm
        )
        self._observations += 1
        return keep

    def _start_anew(self) -> None:
        self._averages.clear()
        self._layers.clear()
        self._observations = 0

    def layer_noise_scales(self) -> tuple[float | None, ...]:
        """S/G2 of each layer in samples, empty while none are measured; None where undefined."""
        return self._layers.noise_scales()

    def summary(self) -> GradientSummary:
        """What is known now."""
        if self._averages.empty:
            return GradientSummary()
        return GradientSummary(
            noise_trace=self._averages["noise_trace"],
            signal_sqnorm=self._averages["signal_sqnorm"],
            observations=self._observations,
            biased=self._biased,
            preconditioned=self._preconditioned,
            gsnr=self._layers.median_gsnr(),
        )

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, and lists of them, for a checkpoint."""
        return {
            **self._averages.state_dict(),
            **self._layers.state_dict(),
            "half_life_samples": self._half_life,
            "observations": self._observations,
            "biased": int(self._biased),
            "preconditioned": int(self._preconditioned),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`, bit for bit. A half-life set in the configuration wins."""
        self._averages.load_state_dict(state)
        self._layers.load_state_dict(state)
        if self._config.half_life_samples is None:
            self._half_life = float(state["half_life_samples"])
        self._observations = int(state["observations"])
        self._biased = bool(state["biased"])
        self._preconditioned = bool(state["preconditioned"])
