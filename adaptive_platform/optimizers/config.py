"""Base of the optimizer configurations: learning rate, decay, and which parameters are excluded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar

from pydantic import Field, field_validator
from pydantic_core.core_schema import ValidationInfo
from torch import nn
from torch.optim import Optimizer

from adaptive_platform.optimizers.exchange import Exchange
from adaptive_platform.optimizers.groups import Exclude, parameter_groups
from adaptive_platform.settings import Variant

__all__ = ["OptimizerConfig", "Share"]

Share = Annotated[float, Field(ge=0, lt=1)]
"""What part of an average stays from step to step."""


class OptimizerConfig(Variant, ABC):
    """What every optimizer has. The learning rate is the one chosen for the base batch."""

    needs_model: ClassVar[bool] = False
    """It listens to the model's layers: only `build_for` can build it, and the loop must drive it
    (`natural.driven.ListeningOptimizer`)."""

    assumes_cross_entropy: ClassVar[bool] = False
    """Its curvature is that of plain cross entropy, whatever the loss is."""

    lr: float = Field(gt=0)
    """Learning rate at the base batch, before schedule and learning-rate rule; > 0."""
    weight_decay: float = Field(default=1e-4, ge=0)
    """Decay per unit of learning rate, of parameters that are not excluded; >= 0."""
    exclude: Exclude = "norm_and_bias"
    """`norm_and_bias`: parameters with fewer than two dimensions get neither decay nor layer-wise
    scaling. `none`: all parameters are treated alike."""
    excluded_lr_scale: float = Field(default=1.0, gt=0)
    """Factor on the learning rate of excluded parameters; > 0. With LARS and its large rates a
    smaller one keeps zero-initialised scales calm."""

    @field_validator("excluded_lr_scale")
    @classmethod
    def _something_is_excluded(cls, scale: float, info: ValidationInfo) -> float:
        if scale != 1.0 and info.data.get("exclude") == "none":
            raise ValueError("with exclude = none there is nothing it applies to; leave it at 1")
        return scale

    @property
    def chosen_momentum(self) -> float | None:
        """The momentum for the base batch, or the first beta; None where there is neither."""
        betas = getattr(self, "betas", (None,))
        chosen: float | None = getattr(self, "momentum", betas[0])
        return chosen

    @property
    def keeps_squares(self) -> bool:
        """True for Adam and its kin, which divide by an average of squared gradients."""
        return hasattr(self, "betas")

    @property
    def lr_in_buffer(self) -> bool:
        """True where the momentum buffer holds steps, `lr * gradient`, instead of gradients."""
        return False

    @abstractmethod
    def build(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
        """The optimizer over the trainable ones of `named_parameters`, each counted once.

        Raises:
            UserError: Nothing is trainable.
        """

    def build_for(self, model: nn.Module, exchange: Exchange | None = None) -> Optimizer:
        """The optimizer of a model's trainable parameters.

        Args:
            model: On its device, in its final memory layout.
            exchange: The other workers, for optimizers that talk to them; alone where None.

        Raises:
            UserError: Nothing is trainable.
        """
        return self.build(model.named_parameters())

    def groups(
        self, named_parameters: Iterable[tuple[str, nn.Parameter]], **excluded_settings: Any
    ) -> list[dict[str, Any]]:
        """Parameter groups by this configuration's rule; `excluded_settings` go to `excluded`."""
        return parameter_groups(
            named_parameters,
            exclude=self.exclude,
            weight_decay=self.weight_decay,
            excluded_lr_scale=self.excluded_lr_scale,
            **excluded_settings,
        )
