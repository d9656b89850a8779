"""A batch that does not move."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from adaptive_platform.controllers.controller import (
    Controller,
    ControllerConfig,
    Decision,
    Observation,
    settle,
)

__all__ = ["Fixed", "FixedConfig"]


class FixedConfig(ControllerConfig):
    """Train with one batch size."""

    kind: Literal["fixed"] = "fixed"

    def build(self) -> Fixed:
        """The controller."""
        return Fixed(self)


class Fixed(Controller):
    """Answers with the configured batch, as far as the limits allow."""

    def __init__(self, config: FixedConfig) -> None:
        self._batch = config.global_batch
        self._unchanged = Decision(
            global_batch=self._batch,
            reason=f"batch stays {self._batch}: fixed",
            changed=False,
            considered=False,
        )

    def decide(self, observation: Observation) -> Decision:
        """See `Controller.decide`."""
        batch = observation.global_batch
        if batch == self._batch and observation.limits.allows(batch):
            return self._unchanged
        decision = settle(observation, self._batch, "fixed")
        return replace(decision, considered=decision.changed)
