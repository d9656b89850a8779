"""Averages of the weights over the steps: exponential (EMA) or equal (SWA), by torch's tools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from pydantic import Field, field_validator
from pydantic_core.core_schema import ValidationInfo
from torch import Tensor, nn
from torch.optim.swa_utils import (
    AveragedModel,
    get_ema_multi_avg_fn,
    get_swa_multi_avg_fn,
)

from adaptive_platform.settings import Settings

__all__ = ["WeightAveraging", "WeightAveragingConfig"]

Tensors = tuple[Tensor, ...] | list[Tensor]


class WeightAveragingConfig(Settings):
    """A second copy of the model that follows the first; evaluations score it.

    Floating-point buffers, such as batch norm's running averages, are averaged with the weights;
    others are copied.
    """

    kind: Literal["ema", "swa"] = "ema"
    """`ema`: exponential average. `swa`: equal weight for every visit (arXiv 1803.05407), with
    `start` late in the run and a learning rate that does not fall to zero before."""
    decay: float = Field(default=0.999, gt=0, lt=1)
    """Share of the old average that stays at a visit, in (0, 1). Only with `ema`."""
    start: float = Field(default=0.0, ge=0, lt=1)
    """Share of the run before the first visit; in [0, 1)."""
    every: int = Field(default=1, ge=1)
    """Optimizer steps from visit to visit."""

    @field_validator("decay")
    @classmethod
    def _forgets(cls, decay: float, info: ValidationInfo) -> float:
        if info.data.get("kind") == "swa" and decay != 0.999:
            raise ValueError("with kind = swa every visit counts alike; leave it out")
        return decay

    def build(self, model: nn.Module) -> WeightAveraging:
        """An average that nothing entered yet.

        Args:
            model: Copied; before anything is hooked to it.
        """
        return WeightAveraging(self, model)


class WeightAveraging:
    """The average of one run, equal on all workers as the weights are."""

    def __init__(self, config: WeightAveragingConfig, model: nn.Module) -> None:
        self._config = config
        function = (
            get_ema_multi_avg_fn(config.decay) if config.kind == "ema" else get_swa_multi_avg_fn()
        )

        def average(averaged: Tensors, current: Tensors, visits: Tensor | int) -> None:
            # Lists are of one type; torch's equal average can't divide counters.
            if averaged[0].is_floating_point():
                function(averaged, current, visits)
            else:
                torch._foreach_copy_(averaged, current)

        self._average = AveragedModel(model, multi_avg_fn=average, use_buffers=True)

    @property
    def model(self) -> nn.Module | None:
        """The average; None while nothing entered."""
        module: nn.Module = self._average.module
        return module if int(self._average.n_averaged) else None

    def visit(self, model: nn.Module, step: int, done: float) -> None:
        """Take the weights after a step in, where that is due.

        Args:
            model: What is trained.
            step: Committed steps so far.
            done: Share of the run that lies behind.
        """
        if done >= self._config.start and step % self._config.every == 0:
            self._average.update_parameters(model)

    def state_dict(self) -> dict[str, Any]:
        """Visits and average, as plain values."""
        return {
            "visits": int(self._average.n_averaged),
            "model": dict(self._average.module.state_dict()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        self._average.n_averaged.fill_(state["visits"])
        self._average.module.load_state_dict(state["model"])
