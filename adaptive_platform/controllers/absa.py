"""A batch that doubles as the loss gets flatter, or after ten epochs (Yao et al. 2018)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from adaptive_platform.controllers.controller import (
    Controller,
    ControllerConfig,
    Decision,
    Need,
    Observation,
    settle,
)
from adaptive_platform.controllers.schedule import reached
from adaptive_platform.progress import Duration

__all__ = ["AbsConfig", "AbsaConfig", "Curvature", "CurvatureConfig"]


class CurvatureConfig(ControllerConfig):
    """Grow at the end of an epoch whose top Hessian eigenvalue fell (arXiv 1810.01021).

    Defaults are the released code's. Its learning rate grows with the batch: use the
    learning-rate rule `linear`, and a schedule for its decays.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({"hessian"})
    growth: int = Field(default=2, ge=2)
    """Factor of one growth."""
    eigenvalue_drop: float = Field(default=2.0, gt=1.0)
    """The batch grows when the eigenvalue is at most its value at the last such growth, divided
    by this."""
    duration_epochs: int = Field(default=10, ge=1)
    """Epochs without growth after which the batch grows anyway."""
    max_ratio: int = Field(default=128, ge=1)
    """Largest batch as a multiple of `global_batch`."""

    def build(self) -> Curvature:
        """A controller that has seen nothing."""
        return Curvature(self, adversarial_fraction=0.0, adversarial_until=None)


class AbsConfig(CurvatureConfig):
    """Adaptive batch size by curvature, without adversarial examples."""

    kind: Literal["abs"] = "abs"


class AbsaConfig(CurvatureConfig):
    """Adaptive batch size by curvature, with adversarial examples early in training."""

    kind: Literal["absa"] = "absa"
    needs: ClassVar[frozenset[Need]] = frozenset({"hessian", "adversarial"})
    adversarial_fraction: float = Field(default=0.2, ge=0.0, le=1.0)
    """Share of each micro-batch that is adversarial at the start; halved with each growth."""
    adversarial_until: Duration = Duration(45)
    """Training after which there are no adversarial examples; published: half of the run."""

    def build(self) -> Curvature:
        """A controller that has seen nothing."""
        return Curvature(
            self,
            adversarial_fraction=self.adversarial_fraction,
            adversarial_until=self.adversarial_until,
        )


class Curvature(Controller):
    """Looks once per epoch, at the first step of the next one.

    Choices where the paper is silent: an eigenvalue that is missing, non-finite or not positive
    triggers nothing and is not remembered, and its epoch still counts towards the duration.
    """

    def __init__(
        self,
        config: CurvatureConfig,
        *,
        adversarial_fraction: float,
        adversarial_until: Duration | None,
    ) -> None:
        self._config = config
        self._until = adversarial_until
        self._epoch = 0
        self._ratio = 1
        self._reference = 0.0  # eigenvalue at the last growth it caused; 0: none was seen yet
        self._epochs_since_growth = 0
        self._adversarial = adversarial_fraction

    @property
    def adversarial_fraction(self) -> float:
        """See `Controller.adversarial_fraction`."""
        return self._adversarial

    def decide(self, observation: Observation) -> Decision:
        """See `Controller.decide`."""
        batch, progress = observation.global_batch, observation.progress
        if progress.epoch == self._epoch:
            if not observation.limits.allows(batch):
                return settle(observation, batch, "the limits moved")
            return Decision(
                global_batch=batch,
                reason=f"batch stays {batch}: looked at each epoch's end",
                changed=False,
                considered=False,
            )
        self._epoch = progress.epoch
        eigenvalue, before = observation.summary.hessian_top_eigenvalue, self._reference
        why = self._look(eigenvalue)
        if self._until is not None and reached(self._until, progress):
            self._adversarial = 0.0
        return settle(
            observation,
            self._config.global_batch * self._ratio,
            why,
            inputs={
                "hessian_top_eigenvalue": eigenvalue,
                "reference_eigenvalue": before,
                "epochs_since_growth": self._epochs_since_growth,
                "ratio": self._ratio,
                "adversarial_fraction": self._adversarial,
            },
        )

    def _look(self, eigenvalue: float | None) -> str:
        """Apply the two rules of growth; returns which one fired."""
        config = self._config
        if self._ratio >= config.max_ratio:
            return f"{self._ratio} times the start, its largest"
        self._epochs_since_growth += 1
        if eigenvalue is not None and math.isfinite(eigenvalue) and eigenvalue > 0.0:
            if self._reference == 0.0:
                self._reference = eigenvalue
            elif eigenvalue <= self._reference / config.eigenvalue_drop:
                why = f"eigenvalue {eigenvalue:.4g} fell from {self._reference:.4g}"
                self._reference = eigenvalue
                self._grow()
                return why
        if self._epochs_since_growth >= config.duration_epochs:
            why = f"{self._epochs_since_growth} epochs without growth"
            self._grow()
            return why
        return f"{self._epochs_since_growth} epochs since growth"

    def _grow(self) -> None:
        self._ratio = min(self._config.growth * self._ratio, self._config.max_ratio)
        self._epochs_since_growth = 0
        self._adversarial /= 2.0
        if self._ratio == self._config.max_ratio:
            self._adversarial = 0.0

    def state_dict(self) -> dict[str, float | int]:
        """See `Controller.state_dict`."""
        return {
            "epoch": self._epoch,
            "ratio": self._ratio,
            "reference_eigenvalue": self._reference,
            "epochs_since_growth": self._epochs_since_growth,
            "adversarial_fraction": self._adversarial,
        }

    def load_state_dict(self, state: Mapping[str, float | int]) -> None:
        """See `Controller.load_state_dict`."""
        self._epoch = int(state["epoch"])
        self._ratio = int(state["ratio"])
        self._reference = float(state["reference_eigenvalue"])
        self._epochs_since_growth = int(state["epochs_since_growth"])
        self._adversarial = float(state["adversarial_fraction"])
