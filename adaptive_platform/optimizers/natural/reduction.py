"""Sums what all workers collected of the factors; each layer's owner gets the means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from adaptive_platform.optimizers.natural.blocks import KroneckerBlock, Statistic, UnitBlock
from adaptive_platform.optimizers.natural.packing import pack, packed_length, unpack
from adaptive_platform.optimizers.natural.workers import Workers

__all__ = ["Seen", "reduce_statistics"]

_MESSAGE_ELEMENTS = 8 * 2**20
"""Factors are reduced in messages of about this size, which bounds the extra memory."""

Block = KroneckerBlock | UnitBlock


@dataclass(frozen=True, slots=True)
class Seen:
    """A statistic that the step collected."""

    block: Block
    part: Statistic
    positions: float
    """Of all workers."""
    first_row: int
    """Positions of the workers before this one: where its rows go."""

    @property
    def elements(self) -> int:
        """Numbers that a worker sends."""
        part = self.part
        if part.total_rows:
            return part.total_rows * part.side
        return packed_length(part.side) if part.side else 3 * self.block.layer.weight.numel()


def reduce_statistics(blocks: Sequence[Block], workers: Workers, samples: int) -> list[Seen]:
    """Leave the means in `total`, on workers that keep them; what was seen, alike on all.

    Sums over samples and positions are divided by true counts, so shares may be uneven. Rows of
    several workers come below each other, in the order of ranks. A layer that nobody used gives
    nothing and stays due.

    Args:
        blocks: All layers.
        workers: Deals the layers out, at first.
        samples: Samples of the step, over all workers.
    """
    wanted = [block for block in blocks if block.wanted]
    if not wanted:
        return []
    seen = _agree(wanted, workers)
    if not workers.placed:
        workers.place([block for block in blocks if isinstance(block, KroneckerBlock)])
    start = 0
    while start < len(seen):
        end, held = start, 0
        dtype = seen[start].block.dtype
        while (
            end < len(seen)
            and seen[end].block.dtype is dtype
            and (end == start or held + seen[end].elements <= _MESSAGE_ELEMENTS)
        ):
            held += seen[end].elements
            end += 1
        _sum(seen[start:end], workers)
        start = end
    for each in seen:
        part = each.part
        count = each.positions if part.name.endswith(".outputs") else float(samples)
        if part.total is not None:
            part.total /= count**0.5 if part.total_rows else count
    return seen


def _agree(wanted: Sequence[Block], workers: Workers) -> list[Seen]:
    """Tell each other who saw how much, and settle on the form of each factor."""
    world, rank = workers.world_size, workers.rank
    numbers: list[float] = []
    lengths = []
    for block in wanted:
        mine = [0.0] * world
        mine[rank] = float(block.positions)
        mine += block.notes() if isinstance(block, KroneckerBlock) else []
        lengths.append(len(mine))
        numbers += mine
    if world > 1:
        device = wanted[0].layer.weight.device
        flat = torch.tensor(numbers, dtype=torch.float64, device=device)
        workers.all.all_reduce(flat)
        numbers = flat.tolist()
    seen = []
    start = 0
    for block, length in zip(wanted, lengths, strict=True):
        told, start = numbers[start : start + length], start + length
        positions = sum(told[:world])
        if positions == 0:
            continue
        if isinstance(block, KroneckerBlock):
            block.agree(positions, told[world:])
        block.account(positions)
        first = round(sum(told[:rank]))
        seen += [Seen(block, p, positions, first) for p in block.parts.values() if p.wanted]
    return seen


def _sum(seen: Sequence[Seen], workers: Workers) -> None:
    if workers.world_size == 1:
        for each in seen:
            collected = each.part.collected
            each.part.total = collected.rows if each.part.total_rows else collected.product
        return
    weight, dtype = seen[0].block.layer.weight, seen[0].block.dtype
    sizes = [each.elements for each in seen]
    flat = torch.zeros(sum(sizes), dtype=dtype, device=weight.device)
    pieces = flat.split(sizes)
    for each, piece in zip(seen, pieces, strict=True):
        _write(each, piece)
    workers.all.all_reduce(flat)
    for each, piece in zip(seen, pieces, strict=True):
        if workers.keeps(each.part):
            each.part.total = _read(each.part, piece)


def _write(each: Seen, piece: Tensor) -> None:
    part = each.part
    if part.total_rows:
        rows = part.collected.rows
        if rows is not None:
            piece.view(part.total_rows, part.side)[each.first_row :][: len(rows)] = rows
    elif part.collected.product is not None:
        product = part.collected.product
        piece.copy_(pack(product) if part.side else product.flatten())


def _read(part: Statistic, piece: Tensor) -> Tensor:
    if part.total_rows:
        return piece.view(part.total_rows, part.side).clone()
    return unpack(piece) if part.side else piece.reshape(3, -1).clone()
