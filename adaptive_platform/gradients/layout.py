"""Which gradients lie where in which flat buffer, and views of them in their parameters' shapes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor, nn

__all__ = [
    "Bucket",
    "Piece",
    "Portion",
    "allocate",
    "bucket_layout",
    "memory_view",
    "pieces_of",
    "portions_of",
    "views_of",
]


def bucket_layout(sizes_bytes: Sequence[int], limit_bytes: int) -> list[list[int]]:
    """Group parameters in backward order into buckets (Yamazaki et al. 2019, static groups).

    Args:
        sizes_bytes: Size of each parameter in registration order.
        limit_bytes: A bucket closes once it holds at least this much.

    Returns:
        Indices per bucket, last-registered parameter first: the order in which gradients get ready.
    """
    buckets: list[list[int]] = []
    current: list[int] = []
    held = 0
    for index in reversed(range(len(sizes_bytes))):
        current.append(index)
        held += sizes_bytes[index]
        if held >= limit_bytes:
            buckets.append(current)
            current, held = [], 0
    if current:
        buckets.append(current)
    return buckets


@dataclass(slots=True)
class Bucket:
    """One flat buffer, the parameters whose gradients it holds, and the count still missing."""

    flat: Tensor
    gradient: Tensor
    parameters: list[nn.Parameter]
    names: list[str]
    views: list[Tensor]
    first_layer: int = 0
    """Where its parameters start in a vector with one entry per layer."""
    missing: int = 0
    """Parameters whose gradients backward has not left yet."""
    fresh: list[int] = field(default_factory=list)
    """Those whose gradients are there, but not in the buffer yet."""
    fresh_bytes: int = 0
    fired: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of one gradient that lies in a part of a bucket, as 1-D elements."""

    index: int
    """Of the parameter among those of the bucket."""
    offset: int
    """Where it begins in that part of the bucket."""
    start: int
    """Its first element in the parameter, in the order of the parameter's memory."""
    length: int

    def of(self, part: Tensor) -> Tensor:
        """Its elements of that part of the bucket."""
        return part[self.offset : self.offset + self.length]


def pieces_of(bucket: Bucket, start: int, stop: int) -> list[Piece]:
    """What elements `[start, stop)` of a bucket are made of, in their order."""
    pieces, first = [], 0
    for index, parameter in enumerate(bucket.parameters):
        last = first + parameter.numel()
        low, high = max(first, start), min(last, stop)
        if low < high:
            pieces.append(Piece(index, low - start, low - first, high - low))
        first = last
    return pieces


@dataclass(frozen=True, slots=True)
class Portion:
    """Elements `[start, stop)` of a part, and what they are made of."""

    start: int
    stop: int
    pieces: list[Piece]
    """Their offsets count from the start of the portion."""


def portions_of(pieces: Sequence[Piece], longest: int) -> list[Portion]:
    """A part, cut evenly so that no portion has more than `longest` elements."""
    portions: list[Portion] = []
    length = sum(piece.length for piece in pieces)
    count = -(-length // longest)
    bounds = [length * number // count for number in range(count + 1)] if count else []
    for start, stop in pairwise(bounds):
        inside = []
        for piece in pieces:
            low, high = max(piece.offset, start), min(piece.offset + piece.length, stop)
            if low < high:
                first = piece.start + low - piece.offset
                inside.append(Piece(piece.index, low - start, first, high - low))
        portions.append(Portion(start, stop, inside))
    return portions


def allocate(
    named: Sequence[tuple[str, nn.Parameter]],
    bucket_bytes: int,
    rider_length: int,
    *,
    rider_apart: bool,
) -> list[Bucket]:
    """Buckets for all parameters, with room for a float32 rider at the end of the last one.

    Args:
        named: Parameters in the order of the model.
        bucket_bytes: Size at which a bucket closes.
        rider_length: Elements of the rider.
        rider_apart: Give the rider a bucket without parameters.
    """
    buckets: list[Bucket] = []
    kinds = dict.fromkeys((p.dtype, p.device) for _, p in named)
    # Float32 last, since the rider needs it.
    for dtype, device in sorted(kinds, key=lambda kind: kind[0] is torch.float32):
        members = [(n, p) for n, p in named if p.dtype is dtype and p.device == device]
        layout = bucket_layout([p.numel() * p.element_size() for _, p in members], bucket_bytes)
        for indices in layout:
            chosen = [members[i] for i in indices]
            buckets.append(_new_bucket(chosen, dtype, device, 0))
    if buckets[-1].flat.dtype is torch.float32 and not rider_apart:
        last = buckets.pop()
        chosen = list(zip(last.names, last.parameters, strict=True))
        device = last.flat.device
        buckets.append(_new_bucket(chosen, torch.float32, device, rider_length))
    else:
        buckets.append(_new_bucket([], torch.float32, buckets[-1].flat.device, rider_length))
    return buckets


def _new_bucket(
    named: list[tuple[str, nn.Parameter]], dtype: torch.dtype, device: torch.device, extra: int
) -> Bucket:
    length = sum(p.numel() for _, p in named)
    flat = torch.zeros(length + extra, dtype=dtype, device=device)
    parameters = [p for _, p in named]
    return Bucket(
        flat=flat,
        gradient=flat[:length],
        parameters=parameters,
        names=[n for n, _ in named],
        views=views_of(flat, parameters),
    )


def views_of(flat: Tensor, parameters: Iterable[Tensor]) -> list[Tensor]:
    """Consecutive pieces of `flat` in the shape and layout of the parameters."""
    views, offset = [], 0
    for parameter in parameters:
        piece = flat[offset : offset + parameter.numel()]
        views.append(memory_view(piece, parameter))
        offset += parameter.numel()
    return views


def memory_view(piece: Tensor, parameter: Tensor) -> Tensor:
    """A view with the parameter's own strides, so that channels_last gradients move unpermuted."""
    stride = parameter.stride()
    dense = sorted((s, n) for s, n in zip(stride, parameter.shape, strict=True) if n > 1)
    expected = 1
    for step, count in dense:
        if step != expected:
            return piece.view(parameter.shape)
        expected *= count
    return piece.as_strided(parameter.shape, stride)
