"""FNGD: an exact damped empirical-Fisher step as a weighted sum of per-sample gradients.

Ou, Zhu, Huang, Liu 2024 (arXiv 2403.03473). By Woodbury's identity `(U U^T / m + lam I)^-1 U 1 / m
= U c` with `c = (U^T U + m lam I)^-1 1`: only an m x m system per layer, for m samples.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from adaptive_platform.errors import CheckpointError
from adaptive_platform.optimizers.config import Share
from adaptive_platform.optimizers.exchange import Exchange
from adaptive_platform.optimizers.natural.blocks import layer_matrix
from adaptive_platform.optimizers.natural.capture import Capture
from adaptive_platform.optimizers.natural.coverage import Layer, cover
from adaptive_platform.optimizers.natural.driven import ListeningOptimizer
from adaptive_platform.optimizers.natural.factors import input_rows, output_rows, with_ones
from adaptive_platform.optimizers.natural.kronecker import NeedsModelConfig

__all__ = ["FNGD", "FngdConfig", "SampleGradients", "coefficients"]


def coefficients(gram: Tensor, damping: float, samples: int) -> Tensor:
    """`c = (U^T U + m lam I)^-1 1`, solved in float64; NaN where that fails.

    Args:
        gram: `U^T U`, shape `[k, k]`; k < m where only k samples used the layer.
        damping: lam, > 0. The ridge is m lam, so that it follows the batch.
        samples: m.

    Returns:
        Shape `[k]`, in the type of `gram`. Entries may be negative.
    """
    system = gram.double()
    system.diagonal().add_(samples * damping)
    factor, info = torch.linalg.cholesky_ex(system)
    ones = system.new_ones(len(system), 1)
    solved = torch.cholesky_solve(ones, factor).squeeze(1)
    return solved.masked_fill(info != 0, torch.nan).to(gram.dtype)


@dataclass(frozen=True, slots=True)
class SampleGradients:
    """Gradients of single samples in one layer, factored where a sample has one position.

    With one position sample i's gradient is `g_i a_i^T`, so it need not be formed.
    """

    left: Tensor
    """`g`, shape `[m, out]`; or whole gradients, `[m, out * in]`, where `right` is None."""
    right: Tensor | None
    """`a`, shape `[m, in]`."""

    @classmethod
    def of(cls, inputs: Tensor, outputs: Tensor) -> SampleGradients:
        """From inputs `[m, T, in]` and output gradients `[m, T, out]` of m samples."""
        if inputs.shape[1] == 1:
            return cls(outputs.squeeze(1), inputs.squeeze(1))
        return cls(torch.einsum("mto,mti->moi", outputs, inputs).flatten(1), None)

    def gram(self) -> Tensor:
        """Inner products of all pairs, `[m, m]`."""
        products = self.left @ self.left.T
        return products if self.right is None else products * (self.right @ self.right.T)

    def weighted_sum(self, weights: Tensor, shape: tuple[int, int]) -> Tensor:
        """`sum_i c_i dW_i`, of shape `[out, in]`, for weights `[m]`."""
        if self.right is None:
            return (weights @ self.left).view(shape)
        return (self.left * weights.unsqueeze(1)).T @ self.right


class FngdConfig(NeedsModelConfig):
    """Inverse-free fast natural gradient; see `FNGD`."""

    kind: Literal["fngd"] = "fngd"
    lr: float = Field(default=0.01, gt=0)
    """Learning rate at the base batch, before schedule and learning-rate rule; > 0. With damping
    lam, directions of small curvature move by `lr / lam` times the gradient."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decay per unit of learning rate, added after preconditioning; >= 0."""
    momentum: Share = 0.9
    """Share of the old step that stays; in [0, 1)."""
    damping: float = Field(default=0.1, gt=0)
    """lam, > 0."""
    solve_epochs: float = Field(default=1.0, gt=0)
    """Epochs in which each step solves for its own coefficients. After them the gradient of each
    layer is multiplied by the mean of its coefficients."""
    uncovered_lr_scale: float = Field(default=1.0, gt=0)
    """Learning rate of parameters with the plain gradient over that of the others; > 0."""

    def build_for(
        self,
        model: nn.Module,
        exchange: Exchange | None = None,
        warn: Callable[[str], None] = warnings.warn,
    ) -> FNGD:
        """`FNGD` over the trainable parameters of `model`, with hooks on its layers.

        Args:
            model: Samples must be the first dimension of every layer's input.
            exchange: The workers; alone where None.
            warn: Told, on the first worker, when a layer falls back to the plain gradient.
        """
        return FNGD(self, model, exchange or Exchange(), warn)


@dataclass(slots=True)
class _LayerState:
    layer: Layer
    rows: dict[int, list[tuple[Tensor, Tensor]]] = field(default_factory=lambda: defaultdict(list))
    """By forward pass: inputs and output gradients of each use, samples first."""
    factor_sum: float = 0.0
    """Sum over solved steps of m times the mean coefficient."""
    factor_count: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        weight = self.layer.weight
        return weight.shape[0], weight[0].numel() + (self.layer.bias is not None)


class FNGD(ListeningOptimizer):
    """The exact damped step per layer in the first epoch, per-layer rescaling after it.

    How the authors store coefficients after the first epoch could not be confirmed. Here the mean
    over its steps is used; positions in a batch mean nothing under shuffling, so that is one factor
    per layer, at the price of SGD. All workers' samples enter one m x m system: rows are gathered,
    which costs `m (in + out)` numbers per linear layer and `m in out` per convolution. For small
    models and batches.

    Args:
        config: All settings.
        model: Its linear and convolutional layers get hooks.
        exchange: The workers.
        warn: Told of layers that fall back.
    """

    def __init__(
        self,
        config: FngdConfig,
        model: nn.Module,
        exchange: Exchange,
        warn: Callable[[str], None],
    ) -> None:
        groups = config.groups(model.named_parameters())
        defaults = {"lr": config.lr, "momentum": config.momentum, "weight_decay": 0.0}
        super().__init__(groups, defaults, config.uncovered_lr_scale)
        self.coverage = cover(model, norms=False)
        self._config, self._exchange, self._warn = config, exchange, warn
        self._warned: set[str] = set()
        self._layers = [_LayerState(layer) for layer in self.coverage.layers]
        self._epochs = 0.0
        self._forward_pass = 0
        self._capture = Capture(self.coverage.layers, self._record, lambda _: self._solves)
        self._count_handle = model.register_forward_pre_hook(self._count_forward)

    def set_progress(self, epochs: float) -> None:
        """Take the fractional epochs done: they tell when solving ends."""
        self._epochs = epochs

    def close(self) -> None:
        """Remove the hooks from the model."""
        super().close()
        self._count_handle.remove()

    @property
    def _solves(self) -> bool:
        return self._epochs < self._config.solve_epochs

    def _count_forward(self, *_: Any) -> None:
        self._forward_pass += 1

    def _record(
        self, index: int, module: nn.Module, inputs: Tensor, gradients: Tensor, scale: float
    ) -> None:
        assert isinstance(module, (nn.Linear, nn.Conv2d))
        state, samples = self._layers[index], inputs.shape[0]
        dtype = torch.promote_types(state.layer.weight.dtype, torch.float32)
        outputs = output_rows(module, gradients, dtype) * scale
        rows = input_rows(module, inputs, dtype)
        rows = rows if state.layer.bias is None else with_ones(rows)
        state.rows[self._forward_pass].append(
            (rows.view(samples, -1, rows.shape[1]), outputs.view(samples, -1, outputs.shape[1]))
        )

    def _forget(self) -> None:
        for state in self._layers:
            state.rows.clear()

    def _directions(self, samples: int) -> dict[nn.Parameter, Tensor]:
        active = [
            state
            for state in self._layers
            if state.layer.weight.grad is not None
            and (state.layer.bias is None or state.layer.bias.grad is not None)
        ]
        if self._solves:
            matrices = self._solve(active, samples)
        else:
            matrices = [
                _matrix(state) * (state.factor_sum / state.factor_count)
                if state.factor_count
                else _matrix(state)
                for state in active
            ]
        self._forget()
        found: dict[nn.Parameter, Tensor] = {}
        for state, matrix in zip(active, matrices, strict=True):
            layer = state.layer
            if layer.bias is not None:
                matrix, found[layer.bias] = matrix[:, :-1], matrix[:, -1]
            found[layer.weight] = matrix.reshape(layer.weight.shape)
        return found

    def _solve(self, active: list[_LayerState], samples: int) -> list[Tensor]:
        own = [_sample_gradients(state) for state in active]
        rank, world = self._exchange.rank, self._exchange.world_size
        counts = torch.zeros(len(active), world, dtype=torch.float64)
        counts[:, rank] = torch.tensor([0 if each is None else len(each.left) for each in own])
        if world > 1 and active:
            device = active[0].layer.weight.device
            moved = counts.to(device)
            self._exchange.all_reduce(moved)
            counts = moved.cpu()
        results = []
        for state, mine, per_rank in zip(active, own, counts.long().tolist(), strict=True):
            plain = _matrix(state)
            everyone = self._gather(state, mine, per_rank, plain.dtype)
            if everyone is None:
                results.append(plain)
                continue
            weights = coefficients(everyone.gram(), self._config.damping, samples)
            if not bool(weights.isfinite().all()):
                self._warn_once(state.layer.name)
                results.append(plain)
                continue
            state.factor_sum += float(weights.sum()) * samples / len(weights)
            state.factor_count += 1
            results.append(everyone.weighted_sum(weights, state.shape))
        return results

    def _gather(
        self,
        state: _LayerState,
        mine: SampleGradients | None,
        per_rank: list[int],
        dtype: torch.dtype,
    ) -> SampleGradients | None:
        """Everyone's samples in rank order; None where nobody used the layer."""
        total = sum(per_rank)
        if total == 0 or self._exchange.world_size == 1:
            return mine
        rows, columns = state.shape
        # Whether gradients are factored is the same for all, but not known without a sample.
        factored = torch.tensor(float(mine is not None and mine.right is not None))
        factored = factored.to(state.layer.weight.device)
        self._exchange.all_reduce(factored)
        widths = [rows, columns] if float(factored) > 0 else [rows * columns]
        flat = torch.zeros(total, sum(widths), dtype=dtype, device=state.layer.weight.device)
        if mine is not None:
            start = sum(per_rank[: self._exchange.rank])
            parts = [mine.left] if mine.right is None else [mine.left, mine.right]
            flat[start : start + len(mine.left)] = torch.cat(parts, dim=1)
        self._exchange.all_reduce(flat)
        left, *right = flat.split(widths, dim=1)
        return SampleGradients(left, right[0] if right else None)

    def _warn_once(self, name: str) -> None:
        if name not in self._warned and self._exchange.rank == 0:
            self._warned.add(name)
            self._warn(
                f"the system of layer `{name}` could not be solved: it uses the plain gradient "
                "until it can. More damping helps."
            )

    def natural_state(self) -> dict[str, Any]:
        """The mean coefficients by layer name."""
        factors = {s.layer.name: [s.factor_sum, s.factor_count] for s in self._layers}
        return {**super().natural_state(), "factors": factors}

    def load_natural_state(self, saved: Mapping[str, Any]) -> None:
        """See the base class."""
        if set(saved["factors"]) != {state.layer.name for state in self._layers}:
            raise CheckpointError(
                "checkpoint: its coefficients are for other layers. Resume with the model and "
                "frozen parameters it was saved with."
            )
        super().load_natural_state(saved)
        for state in self._layers:
            state.factor_sum, state.factor_count = saved["factors"][state.layer.name]


def _matrix(state: _LayerState) -> Tensor:
    weight, bias = state.layer.weight, state.layer.bias
    assert weight.grad is not None
    dtype = torch.promote_types(weight.dtype, torch.float32)
    return layer_matrix(weight.grad, None if bias is None else bias.grad, dtype)


def _sample_gradients(state: _LayerState) -> SampleGradients | None:
    """Of this worker's samples; several uses in one forward pass are further positions."""
    if not state.rows:
        return None
    found = [
        SampleGradients.of(
            torch.cat([inputs for inputs, _ in uses], dim=1),
            torch.cat([outputs for _, outputs in uses], dim=1),
        )
        for _, uses in sorted(state.rows.items())
    ]
    rights = [each.right for each in found if each.right is not None]
    return SampleGradients(
        torch.cat([each.left for each in found]), torch.cat(rights) if rights else None
    )
