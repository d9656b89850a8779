"""Kronecker-factored natural gradient: the optimizer that SP-NGD and K-FAC are settings of."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import nn

from adaptive_platform.errors import UserError
from adaptive_platform.optimizers.config import OptimizerConfig, Share
from adaptive_platform.optimizers.exchange import Exchange
from adaptive_platform.optimizers.natural.capture import Capture
from adaptive_platform.optimizers.natural.coverage import cover
from adaptive_platform.optimizers.natural.curvature import Curvature, CurvatureRules
from adaptive_platform.optimizers.natural.damping import damping_at_batch, warmed_damping
from adaptive_platform.optimizers.natural.driven import ListeningOptimizer
from adaptive_platform.optimizers.natural.inverses import InverseMethod
from adaptive_platform.optimizers.natural.refresh import RefreshPolicy
from adaptive_platform.optimizers.natural.update_rules import (
    MomentumRule,
    kl_clip,
    momentum_at,
    rescale_weight,
)

__all__ = ["KroneckerConfig", "NaturalGradient", "NeedsModelConfig"]


class NeedsModelConfig(OptimizerConfig):
    """Optimizers that listen to the model's layers, so parameters alone can't build them."""

    needs_model: ClassVar[bool] = True

    def build(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        """Refused.

        Raises:
            UserError: Always; `build_for` takes the model.
        """
        raise UserError(
            f"optimizer.kind = {self.kind}: it needs the model, not only its parameters. Use "
            "build_for(model, exchange)."
        )

    @abstractmethod
    def build_for(self, model: nn.Module, exchange: Exchange | None = None) -> ListeningOptimizer:
        """The optimizer of the trainable parameters of `model`, which it puts hooks on."""


class KroneckerConfig(NeedsModelConfig):
    """What the Kronecker-factored optimizers share."""

    weight_decay: float = Field(default=0.0, ge=0)
    """Decay per unit of learning rate, added after preconditioning, of parameters that are not
    excluded; >= 0."""
    momentum: Share = 0.9
    """m0, the share of the old step that stays; in [0, 1)."""
    momentum_rule: MomentumRule = "constant"
    """`ratio`: momentum over learning rate stays m0 / lr (SP-NGD's paper), at most m0.
    `correction`: m0 times the fall of the learning rate since the step before (its code).
    `constant`: m0."""
    damping: float = Field(default=2.5e-4, gt=0)
    """lam at the reference batch; > 0."""
    damping_warmup_factor: float = Field(default=1.0, ge=1)
    """Damping at the first step over `damping`; >= 1. 1: none."""
    damping_warmup_steps: int = Field(default=0, ge=0)
    """Steps in which the larger damping falls, by two decades for each decade between the two."""
    reference_batch: Annotated[int, Field(ge=1)] | None = None
    """Global batch that damping, intervals and decay belong to. Null: that of the first step."""
    damping_batch_power: float = Field(default=0.5, ge=0)
    """Damping falls with this power of the batch over the reference; >= 0. 0: constant."""
    inverse: InverseMethod = "cholesky"
    """`cholesky` and `newton_schulz` (matrix products only) invert factors with the damping split
    over both by their traces; `eigen` adds it to the products of eigenvalues, which is exact but
    costs twice the work in every step. With `cholesky`, and where only the newest batch's values
    count, a factor that is wide for its batch is kept and inverted as rows: the same to rounding,
    and much cheaper for wide layers on small images."""
    norms: bool = True
    """Precondition batch norm's scale and shift by 2x2 blocks."""
    norm_damping_scale: float = Field(default=1.0, gt=0)
    """Damping of norm layers over `damping`; > 0."""
    uncovered_lr_scale: float = Field(default=1.0, gt=0)
    """Learning rate of parameters with the plain gradient over that of the others; > 0."""
    refresh_share: float = Field(default=0.2, gt=0)
    """Work of refreshing factors and inverses, averaged over steps, over that of forward and
    backward passes; > 0. What is due beyond it waits for later steps, the longest overdue first.
    Values that do not exist yet do not wait."""
    gradient_worker_fraction: float = Field(default=0.0, ge=0, le=1)
    """Share of the workers that hold a layer's inverses. 0: one worker per layer, which spreads
    the result (least memory). 1: all, and nothing is sent but new inverses (least traffic)."""
    rescale_weights: bool = False
    """After each step shrink convolution and linear weights to norm sqrt(2 d_out)."""
    kl_clip: Annotated[float, Field(gt=0)] | None = None
    """kappa: preconditioned gradients are scaled down where lr^2 <P, gradient> exceeds it; > 0.
    Null: never."""
    tolerated_failures: int = Field(default=20, ge=0)
    """Failed refreshes of one layer in a row after which the run ends with an error; until then
    it goes on with its last good inverse or the plain gradient."""

    @abstractmethod
    def refresh_policy(self) -> RefreshPolicy:
        """When factors and inverses are made anew."""

    @property
    def similarity(self) -> float:
        """Relative change up to which values of a factor count as similar; 0 where unused."""
        return 0.0

    def build_for(
        self,
        model: nn.Module,
        exchange: Exchange | None = None,
        warn: Callable[[str], None] = warnings.warn,
    ) -> NaturalGradient:
        """`NaturalGradient` over the trainable parameters of `model`, with hooks on its layers.

        Args:
            model: On its device, in its final memory layout.
            exchange: The workers; alone where None.
            warn: Told, on the first worker, when a layer falls back.

        Raises:
            UserError: Nothing is trainable.
        """
        return NaturalGradient(self, model, exchange or Exchange(), warn)


class NaturalGradient(ListeningOptimizer):
    """`G^-1 dW A^-1` for linear and convolutional layers, 2x2 blocks for batch norm.

    Empirical Fisher from the training gradients themselves (SP-NGD, arXiv 2002.06015). Momentum is
    kept on all workers, unlike in SP-NGD, where it lives with a layer's owner; that costs one
    gradient's memory and makes checkpoints and changes of the worker count simple.

    Not promised: exact agreement of one and several workers where batch norm's statistics are
    local, since then the model itself differs.

    Args:
        config: All settings.
        model: Its layers get hooks.
        exchange: The workers.
        warn: Told of layers that fall back.
    """

    def __init__(
        self,
        config: KroneckerConfig,
        model: nn.Module,
        exchange: Exchange,
        warn: Callable[[str], None],
    ) -> None:
        groups = config.groups(model.named_parameters())
        defaults = {"lr": config.lr, "momentum": config.momentum, "weight_decay": 0.0}
        super().__init__(groups, defaults, config.uncovered_lr_scale)
        self._config = config
        self.coverage = cover(model, norms=config.norms)
        rules = CurvatureRules(
            policy=config.refresh_policy(),
            method=config.inverse,
            tolerance=config.similarity,
            refresh_share=config.refresh_share,
            worker_fraction=config.gradient_worker_fraction,
            tolerated_failures=config.tolerated_failures,
            norm_damping_scale=config.norm_damping_scale,
        )
        layers = self.coverage.layers
        self.curvature = Curvature(layers, exchange, rules, warn)
        """The factors and inverses."""
        blocks = self.curvature.blocks
        self._capture = Capture(layers, self.curvature.record, lambda i: blocks[i].wanted)
        self._reference_batch = config.reference_batch
        self._last_lr: dict[str, float] = {}
        self._weights = [layer.weight for layer in layers if not layer.is_norm]

    def _prepare(self) -> None:
        self.curvature.plan(self._steps)

    def _forget(self) -> None:
        self.curvature.clear()

    def _directions(self, samples: int) -> dict[nn.Parameter, torch.Tensor]:
        if self._reference_batch is None:
            self._reference_batch = samples
        damping = self._damping(samples)
        self.curvature.update(self._steps, samples, damping, samples / self._reference_batch)
        directions = self.curvature.directions(damping)
        if self._config.kl_clip is not None and directions:
            params = list(directions)
            steps = list(directions.values())
            grads = [p.grad for p in params if p.grad is not None]
            factor = kl_clip(steps, grads, float(self.param_groups[0]["lr"]), self._config.kl_clip)
            directions = {p: step * factor for p, step in directions.items()}
        return directions

    def _damping(self, samples: int) -> float:
        config = self._config
        assert self._reference_batch is not None
        target = damping_at_batch(
            config.damping, samples, self._reference_batch, config.damping_batch_power
        )
        first = target * config.damping_warmup_factor
        return warmed_damping(target, first, config.damping_warmup_steps, self._steps)

    def _momentum(self, group: dict[str, Any]) -> float:
        lr = float(group["lr"])
        last = self._last_lr.get(group["name"])
        self._last_lr[group["name"]] = lr
        base = self._config.lr * group["lr_scale"]
        return momentum_at(self._config.momentum_rule, group["momentum"], lr, base, last)

    def _apply(self, directions: Mapping[nn.Parameter, torch.Tensor]) -> None:
        super()._apply(directions)
        if self._config.rescale_weights:
            for weight in self._weights:
                rescale_weight(weight)

    def natural_state(self) -> dict[str, Any]:
        """Factors, inverses and intervals by layer name, and what follows the learning rate."""
        return {
            **super().natural_state(),
            "reference_batch": self._reference_batch,
            "last_lr": dict(self._last_lr),
            "curvature": self.curvature.state(),
        }

    def load_natural_state(self, saved: Mapping[str, Any]) -> None:
        """See the base class; inverses of another method are made anew."""
        super().load_natural_state(saved)
        self.curvature.load(saved["curvature"])
        self._reference_batch = saved["reference_batch"]
        self._last_lr = dict(saved["last_lr"])
