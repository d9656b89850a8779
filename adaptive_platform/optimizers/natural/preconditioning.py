"""Turns the reduced gradients into natural ones: each worker its layers, then all get all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from adaptive_platform.optimizers.natural.blocks import KroneckerBlock, UnitBlock
from adaptive_platform.optimizers.natural.inverses import kronecker_solve
from adaptive_platform.optimizers.natural.workers import Workers

__all__ = ["precondition_layers", "precondition_norms"]


def precondition_norms(units: Sequence[UnitBlock], damping: float) -> dict[nn.Parameter, Tensor]:
    """Natural gradients of norm layers that have curvature; every worker makes them all.

    Args:
        units: The layers.
        damping: Added to the diagonal of each block.
    """
    found: dict[nn.Parameter, Tensor] = {}
    for unit in units:
        scale, shift = unit.layer.weight, unit.layer.bias
        assert shift is not None
        if unit.ready and scale.grad is not None and shift.grad is not None:
            grads = scale.grad.to(unit.dtype), shift.grad.to(unit.dtype)
            found[scale], found[shift] = unit.solve(*grads, damping)
    return found


def precondition_layers(
    blocks: Sequence[KroneckerBlock], workers: Workers, damping: float
) -> dict[nn.Parameter, Tensor]:
    """Natural gradients of layers that have curvature; `.grad` is only read.

    Args:
        blocks: The layers.
        workers: Who makes which, and hands it to the others.
        damping: lam, used by the eigen form only.
    """
    active = [block for block in blocks if block.ready and _has_gradient(block)]
    gradients = {block.name: _gradient_matrix(block) for block in active}
    solved = {
        block.name: _solve(block, gradients[block.name], damping)
        for block in active
        if workers.applies(block)
    }
    if workers.row.world_size > 1 and active:
        solved = _swap(active, solved, workers)
    found: dict[nn.Parameter, Tensor] = {}
    for block in active:
        layer = block.layer
        matrix = block.with_all_taps(solved[block.name], gradients[block.name])
        if layer.bias is not None:
            matrix, found[layer.bias] = matrix[:, :-1], matrix[:, -1]
        found[layer.weight] = block.weight_of(matrix)
    return found


def _solve(block: KroneckerBlock, gradient: Tensor, damping: float) -> Tensor:
    matrix = block.only_taps(gradient)
    solved = kronecker_solve(matrix, block.inverse["inputs"], block.inverse["outputs"], damping)
    finite = solved.sum().isfinite()
    if finite.device.type == "cpu":
        return solved if bool(finite) else matrix
    # Decided on the device: asking it for the answer would cost a synchronisation per layer.
    return torch.where(finite, solved, matrix)


def _swap(
    active: Sequence[KroneckerBlock], mine: dict[str, Tensor], workers: Workers
) -> dict[str, Tensor]:
    """Everyone in this worker's row gets all layers."""
    found: dict[str, Tensor] = {}
    for dtype in dict.fromkeys(block.dtype for block in active):
        # Who in the row makes which layers: exactly one, as the row meets each column once.
        makers = [
            [
                block
                for block in active
                if block.dtype is dtype and rank in workers.placement(block).workers
            ]
            for rank in workers.row_ranks
        ]
        lengths = [sum(map(_elements, blocks)) for blocks in makers]
        flat = active[0].layer.weight.new_zeros(max(lengths), dtype=dtype)
        own = makers[workers.row_ranks.index(workers.rank)]
        if own:
            torch.cat(
                [mine[block.name].reshape(-1) for block in own],
                out=flat[: sum(map(_elements, own))],
            )
        for blocks, everything in zip(makers, workers.row.all_gather(flat), strict=True):
            sizes = [_elements(block) for block in blocks]
            pieces = everything[: sum(sizes)].split(sizes) if blocks else ()
            for block, piece in zip(blocks, pieces, strict=True):
                found[block.name] = piece.view(block.outputs.side, block.inputs.side)
    return found


def _elements(block: KroneckerBlock) -> int:
    return block.inputs.side * block.outputs.side


def _has_gradient(block: KroneckerBlock) -> bool:
    layer = block.layer
    return layer.weight.grad is not None and (layer.bias is None or layer.bias.grad is not None)


def _gradient_matrix(block: KroneckerBlock) -> Tensor:
    weight, bias = block.layer.weight.grad, block.layer.bias
    assert weight is not None
    return block.matrix_of(weight, None if bias is None else bias.grad)
