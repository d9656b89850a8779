"""Squared norms of a step's gradients: of each micro-batch, and of the sum over workers."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from adaptive_platform.gradients.contracts import Preconditioner
from adaptive_platform.gradients.layout import Bucket, Piece

__all__ = ["Norms", "sqnorm"]


class Norms:
    """Takes them on the device, without asking it for a number.

    Args:
        num_layers: Length of the vectors with one norm per layer, in the order of the buckets; 0
            for none.
        device: Where gradients are.
        preconditioner: What norms are taken through; plain ones where None.
    """

    def __init__(
        self, num_layers: int, device: torch.device, preconditioner: Preconditioner | None
    ) -> None:
        self._preconditioner = preconditioner
        self.measure = True
        """False in a step that takes the norm of the sum only."""
        self.preconditioned = False
        """True in a step whose norms, but for the summed gradient's own, are those of `P g`."""
        self.seconds = 0.0
        """Host time that this step's squared norms took."""
        self.microbatch = torch.zeros((), device=device)
        """Of the micro-batch in hand."""
        self.layers = torch.zeros(num_layers, device=device)
        """Of each layer of the micro-batch in hand."""
        self.summed = torch.zeros((), device=device)
        """Of the sum, as micro-batches are measured, so through P."""
        self.summed_layers = torch.zeros(num_layers, device=device)

    def begin_step(self, *, measure: bool) -> None:
        """Fix what the step's norms are taken through."""
        self.measure = measure
        self.preconditioned = False
        self.seconds = 0.0
        if measure and self._preconditioner is not None:
            started = time.perf_counter()
            self._preconditioner.begin()
            self.preconditioned = self._preconditioner.active
            self.seconds += time.perf_counter() - started

    def begin_microbatch(self) -> None:
        """Forget the one before."""
        self.microbatch = torch.zeros_like(self.microbatch)
        if self.layers.numel():
            self.layers.zero_()

    def take(self, bucket: Bucket, present: list[int], gradients: list[Tensor]) -> None:
        """Measure some of a micro-batch's fresh gradients.

        Args:
            bucket: Where they go.
            present: Places of their parameters there, ascending; at least one.
            gradients: In that order.
        """
        if not self.measure:
            return
        started = time.perf_counter()
        sqnorms = self._sqnorms([bucket.parameters[i] for i in present], gradients)
        self.microbatch += sqnorms.sum()
        if self.layers.numel():
            first = bucket.first_layer
            if present[-1] - present[0] + 1 == len(present):
                self.layers[first + present[0] : first + present[-1] + 1] = sqnorms
            else:
                for index, each in zip(present, sqnorms.unbind(), strict=True):
                    self.layers[first + index] = each
        self.seconds += time.perf_counter() - started

    def begin_sum(self) -> None:
        """Expect the buckets of the sum."""
        self.summed = torch.zeros_like(self.microbatch)

    def take_sum(self, bucket: Bucket) -> Tensor:
        """Plain squared norm of a summed bucket; what else is measured goes into attributes."""
        started = time.perf_counter()
        if not self._by_layer or not bucket.views:
            plain = measured = sqnorm(bucket.gradient)
        else:
            layers = self._sqnorms(bucket.parameters, bucket.views)
            measured = layers.sum()
            if self.layers.numel():
                first = bucket.first_layer
                self.summed_layers[first : first + len(layers)] = layers
            plain = sqnorm(bucket.gradient) if self.preconditioned else measured
        self.summed += measured
        self.seconds += time.perf_counter() - started
        return plain

    @torch.no_grad()
    def of_portion(
        self, bucket: Bucket, part: Tensor, pieces: Sequence[Piece]
    ) -> tuple[Tensor, Tensor | None]:
        """Squared norms of a portion of a summed bucket; may run on another thread.

        Args:
            bucket: Which.
            part: 1-D, of the bucket's type.
            pieces: What it consists of.

        Returns:
            The plain one, 0-dim; and where layers are told apart, one of each piece, as
            micro-batches are measured.
        """
        if not self._by_layer:
            return sqnorm(part), None
        parts = [piece.of(part) for piece in pieces]
        if self._preconditioner is not None and self.preconditioned:
            layers = self._preconditioner.part_sqnorms(
                [bucket.parameters[piece.index] for piece in pieces],
                [(piece.start, piece.start + piece.length) for piece in pieces],
                parts,
            )
            return sqnorm(part), layers
        layers = torch.stack(torch._foreach_norm(parts, dtype=torch.float32)).square()
        return layers.sum(), layers

    @torch.no_grad()
    def add_portions(
        self, portions: Sequence[tuple[Tensor, Tensor | None]], places: Tensor, found: Tensor
    ) -> None:
        """Sum what `of_portion` gave for all portions of a part.

        Args:
            portions: In their order.
            places: Of the parameter of each piece in the bucket.
            found: Float32 (2 + parameters of the bucket,), written: the part's share of the plain
                norm, of the norm as micro-batches are measured, and of that of each layer.
        """
        found.zero_()
        if not portions:
            return
        found[0] = torch.stack([plain for plain, _ in portions]).sum()
        layers = [each for _, each in portions if each is not None]
        if not layers:
            found[1] = found[0]
            return
        together = torch.cat(layers)
        found[2:].index_add_(0, places, together)
        found[1] = together.sum()

    @property
    def _by_layer(self) -> bool:
        return self.measure and bool(self.layers.numel() or self.preconditioned)

    def _sqnorms(self, parameters: list[nn.Parameter], gradients: list[Tensor]) -> Tensor:
        if self._preconditioner is not None and self.preconditioned:
            return self._preconditioner.sqnorms(parameters, gradients)
        return torch.stack(torch._foreach_norm(gradients, dtype=torch.float32)).square()


def sqnorm(flat: Tensor) -> Tensor:
    """Sum of squares in float32, 0-dim."""
    if flat.dtype is torch.float32:
        return torch.dot(flat, flat)
    return torch.linalg.vector_norm(flat, dtype=torch.float32).square()
