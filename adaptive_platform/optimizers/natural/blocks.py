"""One layer's curvature: what is summed in a batch, what is kept, and how a gradient is solved."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from adaptive_platform.optimizers.natural.collected import Collected
from adaptive_platform.optimizers.natural.coverage import Layer
from adaptive_platform.optimizers.natural.factor_forms import as_matrix, most_rows, widened
from adaptive_platform.optimizers.natural.factors import (
    Taps,
    all_taps,
    input_products,
    input_rows,
    output_rows,
    slides_row_by_row,
    taps_in_use,
    unit_wise_sum,
    with_ones,
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
    collected: Collected = field(default_factory=Collected)
    """This worker's part of the step in hand."""
    total: Tensor | None = None
    """The mean over all workers' samples of the step in hand, on workers that keep it."""
    total_rows: int = 0
    """Rows of `total`, where it is kept as rows; 0 for a matrix. Equal on all workers."""
    value: Tensor | None = None
    """What is used, on workers that keep it."""
    rows: int = 0
    """Rows of `value`, as `total_rows`."""
    older: Tensor | None = None
    """The value before, where the policy compares."""
    older_rows: int = 0
    """Rows of `older`, as `total_rows`."""

    @property
    def inverse_cost(self) -> float:
        """Work of inverting it, in multiply-adds."""
        return float(self.rows or self.side) ** 3

    @property
    def apply_width(self) -> int:
        """Multiply-adds of applying its inverse, per element of the gradient."""
        return 2 * self.rows or self.side

    def accept(self) -> None:
        """Note on all workers that the total became the value."""
        self.older_rows, self.rows = self.rows, self.total_rows

    def clear(self) -> None:
        """Forget the step in hand."""
        self.collected.clear()
        self.total, self.total_rows, self.wanted = None, 0, False


class KroneckerBlock:
    """A linear or convolutional layer with `Fisher ~ A (x) G` (KFC, arXiv 1602.01407).

    A is a sum over positions and a mean over samples, G a mean over both. A second use of the
    layer in one forward pass, and a token of a sequence, count as further positions. Kernel
    positions that never meet the image are left out, so that a 3x3 convolution of 1x1 images is
    treated as the 1x1 convolution that it is, trace and dimension of A included.

    Args:
        layer: What it belongs to.
        keeps_rows: Factors may be kept as rows where those are few.
    """

    def __init__(self, layer: Layer, *, keeps_rows: bool) -> None:
        self.layer = layer
        self.name = layer.name
        weight = layer.weight
        self.dtype = torch.promote_types(weight.dtype, torch.float32)
        self._keeps_rows = keeps_rows
        module = layer.modules[0]
        assert isinstance(module, (nn.Linear, nn.Conv2d))
        self._all_taps = all_taps(module)
        self._channels = weight[0].numel() // len(self._all_taps)
        slides = isinstance(module, nn.Conv2d) and layer.bias is None and slides_row_by_row(module)
        self._slides = slides
        # Columns in the order of the weight's memory, so that a gradient needs no copy.
        self._by_tap = (
            len(self._all_taps) > 1
            and not weight.is_contiguous()
            and weight.is_contiguous(memory_format=torch.channels_last)
        )
        self.taps: Taps = ()
        """Kernel positions that A covers; equal on all workers, empty until one was seen."""
        self._own_taps: Taps = ()
        """Those of this worker's step in hand."""
        self.inputs = Statistic(f"{self.name}.inputs", self._columns(self._all_taps))
        self.outputs = Statistic(f"{self.name}.outputs", weight.shape[0])
        self.pass_cost = 0.0
        """Work of a forward and backward pass over all workers' samples; 0 until it was seen."""
        self.positions = 0
        """This worker's count over the step in hand."""
        self.inverse: dict[str, tuple[Tensor, ...]] = {}
        """By `inputs` and `outputs`, on workers that precondition this layer."""
        self.inverted: dict[str, int] = {}
        """Which inverses exist somewhere, with their rows, 0 for matrices; equal on all workers."""
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
        return self.inputs.inverse_cost + self.outputs.inverse_cost

    @property
    def apply_cost(self) -> float:
        """Work of preconditioning once, in multiply-adds."""
        elements = float(self.inputs.side) * self.outputs.side
        return elements * (self.inputs.apply_width + self.outputs.apply_width)

    def account(self, positions: float) -> None:
        """Note the work of a step with that many positions over all workers."""
        columns, rows = float(self.inputs.side), float(self.outputs.side)
        self.pass_cost = 3 * positions * columns * rows
        share = 1 / 3 if self._slides and self.taps == self._all_taps else 1.0
        for part, factor in ((self.inputs, share), (self.outputs, 1.0)):
            # With rows: products with themselves and two older values, and a triangular solve.
            kept = part.total_rows if part.wanted else part.rows
            width = 4 * positions if kept else factor * part.side
            part.cost = positions * width * part.side

    def record(self, module: nn.Module, inputs: Tensor, gradients: Tensor, scale: float) -> None:
        """Take in one backward."""
        assert isinstance(module, (nn.Linear, nn.Conv2d))
        count = gradients.numel() // self.outputs.side
        self.positions += count
        if self.outputs.wanted:
            outputs = output_rows(module, gradients, self.dtype)
            if self._fits(self.outputs, count, self.outputs.side):
                self.outputs.collected.add_rows(outputs * scale)
            else:
                self.outputs.collected.add_product((outputs.T @ outputs).mul_(scale * scale))
        if self.inputs.wanted:
            self._grow(taps_in_use(module, inputs))
            bias, taps = self.layer.bias is not None, self._own_taps
            if self._fits(self.inputs, count, self._columns(taps)):
                rows = input_rows(module, inputs, self.dtype, taps, by_tap=self._by_tap)
                self.inputs.collected.add_rows(with_ones(rows) if bias else rows)
            else:
                self.inputs.collected.add_product(
                    input_products(
                        module, inputs, self.dtype, bias=bias, taps=taps, by_tap=self._by_tap
                    )
                )

    def clear(self) -> None:
        """Forget the step in hand."""
        self.positions = 0
        self._own_taps = self.taps
        for part in self.parts.values():
            part.clear()

    # --- what all workers agree on ---------------------------------------------------------------

    def notes(self) -> list[float]:
        """What this worker has to tell of the step in hand: a sum over all goes to `agree`."""
        used = [float(tap in self._own_taps) for tap in self._all_taps]
        return [*used, *(float(part.collected.is_product) for part in self.parts.values())]

    def agree(self, positions: float, notes: list[float]) -> None:
        """Bring what was collected into the form that all workers use.

        Args:
            positions: Of all workers.
            notes: Sum of all workers' `notes`.
        """
        if self.inputs.wanted:
            self._cover(tuple(tap for tap in self._all_taps if notes[tap]))
        for part, product in zip(self.parts.values(), notes[len(self._all_taps) :], strict=True):
            few = self._keeps_rows and not product and positions <= most_rows(part.side)
            part.total_rows = round(positions) if few and part.wanted else 0
            if not few:
                part.collected.to_product()

    def matrix_of(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """A gradient as `[out, columns]`, in the order of A, the bias last; mostly no copy."""
        if self._by_tap:
            weight = weight.permute(0, 2, 3, 1)
        return layer_matrix(weight, bias, self.dtype)

    def weight_of(self, matrix: Tensor) -> Tensor:
        """The inverse of `matrix_of`, without bias, in the weight's own layout."""
        out, channels, *kernel = self.layer.weight.shape
        if self._by_tap:
            return matrix.reshape(out, *kernel, channels).permute(0, 3, 1, 2)
        return matrix.reshape(out, channels, *kernel)

    def order(self, *, saving: bool) -> Tensor | None:
        """For `reordered`: from A's columns to `weight.flatten(1)`'s, or back; None: the same."""
        if not self._by_tap or len(self.taps) < 2:
            return None
        shape = (len(self.taps), self._channels) if saving else (self._channels, len(self.taps))
        order = torch.arange(shape[0] * shape[1]).view(shape).T.flatten()
        if self.layer.bias is not None:
            order = torch.cat([order, torch.tensor([len(order)])])
        return order.to(self.layer.weight.device)

    def only_taps(self, matrix: Tensor) -> Tensor:
        """Of a gradient `[out, in]` the columns that A covers."""
        if self.taps == self._all_taps:
            return matrix
        return matrix[:, self._places(self.taps, self._all_taps, matrix.device)]

    def with_all_taps(self, matrix: Tensor, gradient: Tensor) -> Tensor:
        """The inverse of `only_taps`, with the gradient's own columns elsewhere.

        Those are zero as long as images have the size that A was collected at.
        """
        if self.taps == self._all_taps:
            return matrix
        full = gradient.clone()
        full[:, self._places(self.taps, self._all_taps, matrix.device)] = matrix
        return full

    def restore_taps(self, taps: Taps) -> None:
        """Take them from a checkpoint."""
        self.taps = self._own_taps = taps
        self.inputs.side = self._columns(taps or self._all_taps)

    def use_own_form(self) -> None:
        """After loading: matrices where rows of an earlier setting are not wanted now."""
        if self._keeps_rows:
            return
        for part in self.parts.values():
            for name in ("value", "older"):
                kept = getattr(part, name)
                if kept is not None:
                    setattr(part, name, as_matrix(kept))
            part.rows = part.older_rows = 0

    def _cover(self, taps: Taps) -> None:
        self._grow(taps)
        if taps == self.taps:
            return
        places = self._places(self.taps, taps, self.layer.weight.device)
        for name in ("value", "older"):
            kept = getattr(self.inputs, name)
            if kept is not None:
                setattr(self.inputs, name, widened(kept, places, self._columns(taps)))
        self.inverse, self.inverted = {}, {}
        self.restore_taps(taps)

    def _grow(self, taps: Taps) -> None:
        """Make room for kernel positions that this step had not met before."""
        merged = tuple(sorted({*self._own_taps, *taps}))
        if merged != self._own_taps:
            places = self._places(self._own_taps, merged, self.layer.weight.device)
            self.inputs.collected.widen(places, self._columns(merged))
            self._own_taps = merged

    def _fits(self, part: Statistic, count: int, side: int) -> bool:
        held = part.collected
        return (
            self._keeps_rows and not held.is_product and (held.num_rows + count <= most_rows(side))
        )

    def _columns(self, taps: Taps) -> int:
        return self._channels * len(taps) + (self.layer.bias is not None)

    def _places(self, some: Taps, among: Taps, device: torch.device) -> Tensor:
        """Columns of `some` kernel positions in a factor of `among`; a bias comes last."""
        numbers = torch.tensor([among.index(tap) for tap in some], dtype=torch.long)
        channels = torch.arange(self._channels)
        if self._by_tap:
            places = (numbers.unsqueeze(1) * self._channels + channels).flatten()
        else:
            places = (channels.unsqueeze(1) * len(among) + numbers).flatten()
        if self.layer.bias is not None:
            places = torch.cat([places, torch.tensor([self._columns(among) - 1])])
        return places.to(device)


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
        self.fisher.collected.add_product(total.mul_(scale * scale))

    def account(self, positions: float) -> None:
        """Note the work of a step with that many positions over all workers."""
        self.fisher.cost = _COST_PER_ELEMENT * positions * self.layer.weight.numel()

    def clear(self) -> None:
        """Forget the step in hand."""
        self.positions = 0
        self.fisher.clear()

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
