"""Adam's diagonal preconditioner as a measure of gradients, for noise in the optimizer's own eyes.

Pollux (Qiao et al., OSDI 2021, section 3.1) measures the noise scale of `P g` in the place of `g`,
with P the preconditioner of the optimizer; AdaptDL takes `P = 1 / (sqrt(v^) + eps)`, `v^` Adam's
bias-corrected average of squared gradients up to the step before. So P is a constant of the step,
the same on all workers, and norms of `P g` add up over micro-batches as norms of `g` do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["FIRST_STEPS", "AdamPreconditioner"]

FIRST_STEPS = 5
"""Optimizer steps before which P is the identity, as AdaptDL has it: the average is too young."""

_CHUNK = 1 << 17
"""Elements that a CPU takes at a time, so that what lies between two operations stays in cache."""


class AdamPreconditioner:
    """Squared norms of `P g` for an optimizer that keeps `exp_avg_sq`, such as AdamW and LAMB.

    Two things that are not as in AdaptDL: an element whose average is still zero has no P and is
    left out, where `1 / eps` would let it outweigh all others; and so is a parameter that has made
    fewer than five steps while others have made more, since `g` and `P g` differ in unit.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._averages: dict[int, _Average] = {}
        self._scratch = torch.empty(2, _CHUNK).unbind()
        self._scratch_of_parts = torch.empty(2, _CHUNK).unbind()

    @property
    def active(self) -> bool:
        """True once P is more than the identity; as of `begin`, and equal on all workers."""
        return bool(self._averages)

    def begin(self) -> None:
        """Take the averages as they are before a step."""
        self._averages = {}
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                state = self._optimizer.state.get(parameter, {})
                steps = int(state.get("step", 0))
                if steps >= FIRST_STEPS:
                    kept = state.get("max_exp_avg_sq", state["exp_avg_sq"])
                    self._averages[id(parameter)] = _Average(
                        kept, _correction(group, steps), float(group["eps"])
                    )

    @torch.no_grad()
    def sqnorms(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
        """|P g|^2 of each parameter, where `active`.

        Args:
            parameters: Of the optimizer.
            gradients: Of the same shapes and, for speed, of the same strides.

        Returns:
            Float32, one entry per parameter, on the gradients' device.
        """
        if gradients[0].device.type == "cpu":
            found = [self._sqnorm(p, g) for p, g in zip(parameters, gradients, strict=True)]
            return torch.stack(found)
        scaled = self.scaled(parameters, gradients)
        return torch.stack(torch._foreach_norm(scaled, dtype=torch.float32)).square()

    @torch.no_grad()
    def scaled(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
        """`P g` of each parameter in new float32 tensors, where `active`."""
        return [
            self._averages[id(p)].scaled(gradient)
            if id(p) in self._averages
            else torch.zeros_like(gradient, dtype=torch.float32)
            for p, gradient in zip(parameters, gradients, strict=True)
        ]

    @torch.no_grad()
    def part_sqnorms(
        self,
        parameters: Sequence[Tensor],
        parts: Sequence[tuple[int, int]],
        gradients: Sequence[Tensor],
    ) -> Tensor:
        """|P g|^2 of a part of each parameter, where `active`; may run beside `sqnorms`.

        Args:
            parameters: Of the optimizer.
            parts: Elements `[start, stop)` of each, in the order of the parameter's memory.
            gradients: 1-D, of these elements.

        Returns:
            Float32, one entry per parameter, on the gradients' device.
        """
        found = []
        for parameter, (start, stop), gradient in zip(parameters, parts, gradients, strict=True):
            of = self._averages.get(id(parameter))
            if of is None:
                found.append(torch.zeros((), device=gradient.device))
                continue
            kept = _in_memory_order(of.kept, parameter)[start:stop]
            part = _Average(kept, of.correction, of.eps)
            if gradient.device.type == "cpu" and gradient.dtype is kept.dtype is torch.float32:
                found.append(part.sqnorm(gradient, self._scratch_of_parts))
            else:
                found.append(part.scaled(gradient).square().sum())
        return torch.stack(found)

    def _sqnorm(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        """One parameter's |P g|^2 on a CPU."""
        if id(parameter) not in self._averages:
            return torch.zeros(())
        of = self._averages[id(parameter)]
        if not _alike(gradient, of.kept):
            return of.scaled(gradient).square().sum()
        return of.sqnorm(gradient, self._scratch)


@dataclass(frozen=True, slots=True)
class _Average:
    """The average of one parameter's squared gradients, with what makes a P of it."""

    kept: Tensor
    correction: float
    """Root of what bias correction divides the average by."""
    eps: float

    def scaled(self, gradient: Tensor) -> Tensor:
        roots = self.kept.float().sqrt().div_(self.correction).add_(self.eps)
        return torch.where(self.kept > 0, gradient.float() / roots, 0.0)

    def sqnorm(self, gradient: Tensor, scratch: tuple[Tensor, ...]) -> Tensor:
        """|P g|^2, piece by piece; the gradient lies in memory as the average does."""
        found = torch.zeros(())
        for piece, kept in zip(_pieces(gradient), _pieces(self.kept), strict=True):
            roots, scaled = (memory[: piece.numel()] for memory in scratch)
            torch.sqrt(kept, out=roots)
            roots.add_(self.eps * self.correction)
            torch.sign(kept, out=scaled)
            scaled.div_(roots).mul_(piece)
            found += torch.dot(scaled, scaled)
        return found * self.correction**2


def _correction(group: dict[str, Any], steps: int) -> float:
    corrected = group.get("bias_correction", True)
    return math.sqrt(1.0 - group["betas"][1] ** steps) if corrected else 1.0


def _alike(gradient: Tensor, kept: Tensor) -> bool:
    """True where both lie in memory in the same order, in float32."""
    strides = zip(gradient.stride(), kept.stride(), gradient.shape, strict=True)
    return gradient.dtype is kept.dtype is torch.float32 and all(
        one == other or size == 1 for one, other, size in strides
    )


def _pieces(tensor: Tensor) -> tuple[Tensor, ...]:
    """A dense tensor in 1-D pieces, in the order of its memory."""
    return tensor.as_strided((tensor.numel(),), (1,)).split(_CHUNK)


def _in_memory_order(kept: Tensor, parameter: Tensor) -> Tensor:
    """All elements of `kept`, 1-D, in the order in which those of the parameter lie in memory.

    A parameter with gaps in its memory counts as contiguous, as it does in the buckets.
    """
    if not torch.ops.aten.is_non_overlapping_and_dense(parameter):
        return kept.reshape(-1)
    if kept.stride() != parameter.stride():
        kept = torch.empty_like(parameter, dtype=kept.dtype).copy_(kept)
    return kept.as_strided((kept.numel(),), (1,))
