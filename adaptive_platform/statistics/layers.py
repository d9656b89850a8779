"""Noise and signal of each layer, smoothed: per-layer noise scales and the median GSNR."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["LayerAverages"]


class LayerAverages:
    """Exponential averages of S and G2 for every layer, in the order of the model's parameters.

    Only ratios of the two are read, so the weights need no correction.
    """

    def __init__(self) -> None:
        self._noise: npt.NDArray[np.float64] = np.zeros(0)
        self._signal: npt.NDArray[np.float64] = np.zeros(0)
        self._median: float | None = None

    def add(
        self,
        micro_sqnorms: Sequence[float],
        global_sqnorms: Sequence[float],
        *,
        leverage: float,
        global_batch: int,
        keep: float,
    ) -> None:
        """Let one step in; one with a non-finite number is left out.

        Args:
            micro_sqnorms: mean_i |g_i|^2 of each layer.
            global_sqnorms: |G|^2 of each layer.
            leverage: `StepMoments.leverage`.
            global_batch: Samples of the step.
            keep: What the past is multiplied by.

        Raises:
            ValueError: Numbers of layers differ, or are not those of the steps before.
        """
        if len(micro_sqnorms) != len(global_sqnorms):
            raise ValueError(f"{len(micro_sqnorms)} and {len(global_sqnorms)} layers measured")
        whole = np.asarray(global_sqnorms, dtype=np.float64)
        noise = (np.asarray(micro_sqnorms, dtype=np.float64) - whole) / leverage
        signal = whole - noise / global_batch
        if not bool(np.isfinite(noise).all() and np.isfinite(signal).all()):
            return
        if self._noise.size not in (0, noise.size):
            raise ValueError(f"{noise.size} layers measured, but {self._noise.size} before")
        if self._noise.size == 0:
            self._noise, self._signal = np.zeros_like(noise), np.zeros_like(signal)
        self._noise = keep * self._noise + (1.0 - keep) * noise
        self._signal = keep * self._signal + (1.0 - keep) * signal
        self._median = self._median_gsnr()

    def noise_scales(self) -> tuple[float | None, ...]:
        """S/G2 of each layer in samples; None where noise hides the signal or there is none."""
        return tuple(
            float(noise / signal) if noise > 0.0 and signal > 0.0 else None
            for noise, signal in zip(self._noise, self._signal, strict=True)
        )

    def median_gsnr(self) -> float | None:
        """Median over the layers of G2/S, with G2 clipped at 0; None where no layer has noise.

        The median, so that a few layers without noise, or without signal, decide nothing.
        """
        return self._median

    def _median_gsnr(self) -> float | None:
        noisy = self._noise > 0.0
        if not bool(noisy.any()):
            return None
        ratios = np.maximum(self._signal[noisy], 0.0) / self._noise[noisy]
        median = float(np.median(ratios))
        return median if np.isfinite(median) else None

    def clear(self) -> None:
        """Forget everything."""
        self._noise, self._signal, self._median = np.zeros(0), np.zeros(0), None

    def state_dict(self) -> dict[str, Any]:
        """Lists of plain numbers for a checkpoint."""
        return {"layer_noise": self._noise.tolist(), "layer_signal": self._signal.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`, bit for bit."""
        self._noise = np.asarray(state["layer_noise"], dtype=np.float64)
        self._signal = np.asarray(state["layer_signal"], dtype=np.float64)
        self._median = self._median_gsnr()
