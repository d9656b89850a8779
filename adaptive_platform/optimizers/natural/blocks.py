"""One layer's curvature: what is summed in a batch, what is kept, and how a gradient is solved."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from adaptive_platform.optimizers.natural.coverage import Layer
from adaptive_platform.optimizers.natural.factors import (
    input_products,
    output_rows,
    slides_row_by_row,
    unit_wise_sum,
)
from adaptive_platform.optimizers.natural.refresh import RefreshState

__all__ = ["KroneckerBlock", "Statistic", "UnitBlock", "layer_matrix"]

_COST_PER_ELEMENT = 50.0
"""Work per element of a norm layer's input, in multiply-adds of a matrix product (measured)."""


@dataclass(slots=True)
class Statistic:
    """One factor: A, G, or a norm layer's blocks."""

    name: str
    side: int
    """Rows of the matrix; 0 for a norm layer's `[3, C]`."""
    cost: float = 0.0
    """Work of collecting it once over all workers, in multiply-adds; 0 until it was seen."""
    state: RefreshState = field(default_factory=RefreshState)
    wanted: bool = False
    """Collected in the step in hand."""
    total: Tensor | None = None
    """This worker's sum over the step in hand."""
    value: Tensor | None = None
    """What is used, on workers that keep it."""
    older: Tensor | None = None
    """The value before, where the policy compares."""

    def add(self, term: Tensor) -> None:
        """Add one backward's part."""
        self.total = term if self.total is None else self.total.add_(term)


class KroneckerBlock:
    """A linear or convolutional layer with `Fisher ~ A (x) G` (KFC, arXiv 1602.01407).

    A is a sum over positions and a mean over samples, G a mean over both. A second use of the
    layer in one forward pass, and a token of a sequence, count as further positions.
    """

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.name = layer.name
        weight = layer.weight
        self.dtype = torch.promote_types(weight.dtype, torch.float32)
        columns = weight[0].numel() + (layer.bias is not None)
        rows = weight.shape[0]
        self.inputs = Statistic(f"{self.name}.inputs", columns)
        self.outputs = Statistic(f"{self.name}.outputs", rows)
        module = layer.modules[0]
        slides = isinstance(module, nn.Conv2d) and layer.bias is None and slides_row_by_row(module)
        self._input_share = 1 / 3 if slides else 1.0
        self.pass_cost = 0.0
        """Work of a forward and backward pass over all workers' samples; 0 until it was seen."""
        self.positions = 0
        """This worker's count over the step in hand."""
        self.inverse: dict[str, tuple[Tensor, ...]] = {}
        """By `inputs` and `outputs`, on workers that precondition this layer."""
        self.inverted: set[str] = set()
        """Which inverses exist somewhere; equal on all workers."""
        self.inverse_due = 0
        """Step of the next inverse, where it has an interval of its own."""
        self.inverse_damping = 0.0
        """Damping that the inverses were made with; equal on all workers."""
        self.failures = 0
        """Refreshes in a row that failed; equal on all workers."""

    @property
    def parts(self) -> dict[str, Statistic]:
        """Both factors by name."""
        return {"inputs": self.inputs, "outputs": self.outputs}

    @property
    def ready(self) -> bool:
        """Both inverses exist, so that the gradient can be preconditioned."""
        return len(self.inverted) == 2

    @property
    def wanted(self) -> bool:
        """Anything is collected in the step in hand."""
        return self.inputs.wanted or self.outputs.wanted

    @property
    def inverse_cost(self) -> float:
        """Work of both inverses, in multiply-adds."""
        return float(self.inputs.side) ** 3 + float(self.outputs.side) ** 3

    def account(self, positions: float) -> None:
        """Note the work of a step with that many positions over all workers."""
        columns, rows = float(self.inputs.side), float(self.outputs.side)
        self.inputs.cost = self._input_share * positions * columns**2
        self.outputs.cost = positions * rows**2
        self.pass_cost = 3 * positions * columns * rows

    def record(self, module: nn.Module, inputs: Tensor, gradients: Tensor, scale: float) -> None:
        """Take in one backward."""
        assert isinstance(module, (nn.Linear, nn.Conv2d))
        self.positions += gradients.numel() // self.outputs.side
        if self.outputs.wanted:
            outputs = output_rows(module, gradients, self.dtype)
            self.outputs.add((outputs.T @ outputs).mul_(scale * scale))
        if self.inputs.wanted:
            bias = self.layer.bias is not None
            self.inputs.add(input_products(module, inputs, self.dtype, bias=bias))

    def clear(self) -> None:
        """Forget the step in hand."""
        self.positions = 0
        for part in self.parts.values():
            part.total, part.wanted = None, False


class UnitBlock:
    """A batch-norm layer with a 2x2 Fisher block per channel (arXiv 2002.06015)."""

    def __init__(self, layer: Layer) -> None:
        assert layer.bias is not None
        self.layer = layer
        self.name = layer.name
        self.dtype = torch.promote_types(layer.weight.dtype, torch.float32)
        self.fisher = Statistic(f"{self.name}.fisher", 0)
        self.positions = 0
        """This worker's count over the step in hand."""

    @property
    def parts(self) -> dict[str, Statistic]:
        """The one statistic by name."""
        return {"fisher": self.fisher}

    @property
    def ready(self) -> bool:
        """Its Fisher blocks exist."""
        return self.fisher.value is not None

    @property
    def wanted(self) -> bool:
        """Collected in the step in hand."""
        return self.fisher.wanted

    def record(self, module: nn.Module, inputs: Tensor, gradients: Tensor, scale: float) -> None:
        """Take in one backward."""
        assert isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d))
        self.positions += gradients.numel() // gradients.shape[1]
        total = unit_wise_sum(module, inputs, gradients, self.dtype)
        self.fisher.add(total.mul_(scale * scale))

    def account(self, positions: float) -> None:
        """Note the work of a step with that many positions over all workers."""
        self.fisher.cost = _COST_PER_ELEMENT * positions * self.layer.weight.numel()

    def clear(self) -> None:
        """Forget the step in hand."""
        self.positions = 0
        self.fisher.total, self.fisher.wanted = None, False

    def solve(self, scale_gradient: Tensor, shift_gradient: Tensor, damping: float) -> list[Tensor]:
        """`(F_c + damping I)^-1 [dgamma, dbeta]` per channel, in closed form.

        Where that is not finite the plain gradient comes back.
        """
        assert self.fisher.value is not None
        of_scale, mixed, of_shift = self.fisher.value
        of_scale, of_shift = of_scale + damping, of_shift + damping
        determinant = of_scale * of_shift - mixed * mixed
        scale = (of_shift * scale_gradient - mixed * shift_gradient) / determinant
        shift = (of_scale * shift_gradient - mixed * scale_gradient) / determinant
        finite = (scale.isfinite() & shift.isfinite()).all()
        return [
            torch.where(finite, scale, scale_gradient),
            torch.where(finite, shift, shift_gradient),
        ]


def layer_matrix(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Weight gradient as `[out, in * kh * kw]` with the bias gradient as last column.

    In any memory layout; a copy only where it is needed.
    """
    matrix = weight.reshape(weight.shape[0], -1).to(dtype)
    return matrix if bias is None else torch.cat([matrix, bias.to(dtype).unsqueeze(1)], dim=1)
