"""Small agreements between workers: the same error, the same bytes, the same weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import torch
from torch import Tensor, nn

from adaptive_platform.collectives import Reducer

__all__ = ["agree_on_weights", "everyones", "from_first", "from_rank", "raise_first"]

T = TypeVar("T")


def raise_first(reducer: Reducer, error: Exception | None) -> None:
    """Raise the error of the lowest rank that has one, on every worker; return if none has.

    The error's `agreed` is then True: whoever catches it knows that no worker waits for another.
    """
    for found in reducer.all_gather_object(error):
        if found is not None:
            found.agreed = True
            raise found


def everyones(reducer: Reducer, mine: Iterable[T]) -> list[T]:
    """The items of all workers, in rank order."""
    return [item for share in reducer.all_gather_object(list(mine)) for item in share]


def from_first(reducer: Reducer, content: bytes, device: torch.device) -> bytes:
    """Rank 0's bytes on every worker."""
    return from_rank(reducer, content, device, 0)


def from_rank(reducer: Reducer, content: bytes, device: torch.device, source: int) -> bytes:
    """The bytes of rank `source` on every worker."""
    if reducer.world_size == 1:
        return content
    size: int = reducer.all_gather_object(len(content))[source]
    if size == 0:
        return b""
    data = torch.empty(size, dtype=torch.uint8)
    if reducer.rank == source:
        data = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    data = data.to(device)
    reducer.broadcast(data, source)
    return data.cpu().numpy().tobytes()


def agree_on_weights(reducer: Reducer, model: nn.Module) -> None:
    """Rank 0's parameters and buffers on every worker; sent only where a checksum differs.

    Workers that build from one seed need no broadcast (Yamazaki et al. 2019), but a model that a
    user made without a seed would otherwise differ from worker to worker without a sign.
    """
    tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
    sums = torch.stack([t.detach().double().sum() for t in tensors])
    # Compared as bits, in which a NaN equals itself.
    mine = sums.view(torch.int64)
    if all(torch.equal(other, mine) for other in reducer.all_gather(mine)):
        return
    for tensor in tensors:
        reducer.broadcast(tensor.data)
