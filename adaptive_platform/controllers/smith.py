"""Increase the batch where the recipe would decay the learning rate (Smith et al. 2017)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Literal

from pydantic import Field, field_validator, model_validator
from typing_extensions import Self

from adaptive_platform.controllers.controller import (
    Controller,
    ControllerConfig,
    Decision,
    Observation,
    settle,
)
from adaptive_platform.controllers.schedule import reached
from adaptive_platform.progress import Duration

__all__ = ["Smith", "SmithConfig"]


class SmithConfig(ControllerConfig):
    """Multiply the batch at each decay; what no batch can hold decays the learning rate.

    Keeps the noise `lr * D / B` of the decaying recipe (arXiv 1711.00489), through rounding and
    limits. Use it with a schedule that does not decay and with the learning-rate rule `none`.
    """

    kind: Literal["smith"] = "smith"
    decays: tuple[Duration, ...] = Field(min_length=1, max_length=50)
    """Where the recipe would decay, such as `60 epochs`, all in one unit and rising."""
    factor: float = Field(default=5.0, gt=1.0, le=1000.0)
    """By which the recipe would divide its learning rate at each decay."""
    max_batch: int | None = Field(default=None, ge=1)
    """Largest global batch, in samples; the paper uses a tenth of the data. None: all the data."""

    @field_validator("decays")
    @classmethod
    def _in_order(cls, decays: tuple[Duration, ...]) -> tuple[Duration, ...]:
        if len({decay.unit for decay in decays}) > 1:
            raise ValueError("count every decay in the same unit")
        values = [decay.value for decay in decays]
        if values[0] <= 0 or any(a >= b for a, b in itertools.pairwise(values)):
            raise ValueError("decays must be above 0 and rise")
        return decays

    @model_validator(mode="after")
    def _check_max_batch(self) -> Self:
        if self.max_batch is not None and self.max_batch < self.global_batch:
            raise ValueError(
                f"max_batch {self.max_batch} is below global_batch {self.global_batch}: "
                "raise the one or lower the other"
            )
        return self

    def build(self) -> Smith:
        """A controller that has seen nothing."""
        return Smith(self)


class Smith(Controller):
    """Looks up how many decays are due and splits each between batch and learning rate."""

    def __init__(self, config: SmithConfig) -> None:
        self._config = config
        self._lr_factor = 1.0
        self._decays = 0

    @property
    def lr_factor(self) -> float:
        """`(B / B0) / factor^decays`: 1 as long as the batch takes all of the decay."""
        return self._lr_factor

    def decide(self, observation: Observation) -> Decision:
        """See `Controller.decide`."""
        config, batch = self._config, observation.global_batch
        due = sum(reached(decay, observation.progress) for decay in config.decays)
        limits = observation.limits.narrowed(None, config.max_batch)
        if due == self._decays and limits.allows(batch):
            return Decision(
                global_batch=batch,
                reason=f"batch stays {batch}: no decay is due",
                changed=False,
                considered=False,
            )
        self._decays = due
        noise = config.factor**due
        decision = settle(
            observation,
            config.global_batch * noise,
            f"{due} of {len(config.decays)} decays by {config.factor:g}",
            limits=limits,
            inputs={"decays": due},
        )
        self._lr_factor = decision.global_batch / config.global_batch / noise
        return decision

    def state_dict(self) -> dict[str, float | int]:
        """See `Controller.state_dict`."""
        return {"decays": self._decays, "lr_factor": self._lr_factor}

    def load_state_dict(self, state: Mapping[str, float | int]) -> None:
        """See `Controller.load_state_dict`."""
        self._decays = int(state["decays"])
        self._lr_factor = float(state["lr_factor"])
