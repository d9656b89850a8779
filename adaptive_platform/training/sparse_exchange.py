"""Gradients of a step summed chunk by chunk: what each worker has not sent yet is its own state.

Only a committed step moves that state, and it is part of the checkpoint. With as many workers as
before each goes on with its own; with another number what waits is dealt out anew. Its sum over the
workers, which is all that counts, stays the same.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from adaptive_platform.collectives import Reducer
from adaptive_platform.collectives.sparse import SparseState, choose_chunks
from adaptive_platform.collectives.sparse_config import SparseConfig
from adaptive_platform.training.unison import from_rank

__all__ = ["SparseExchange"]


class SparseExchange:
    """Sums the gradients of all buckets and the rider in two messages.

    Args:
        config: How sparsely.
        reducer: All workers.
        epoch: Says where the run stands, in epochs.
    """

    def __init__(self, config: SparseConfig, reducer: Reducer, epoch: Callable[[], float]) -> None:
        self._config = config
        self._reducer = reducer
        self._epoch = epoch
        self._states: list[SparseState] = []
        self._before: list[tuple[Tensor, Tensor | None]] = []

    def prepare(self, lengths: Sequence[int], device: torch.device) -> None:
        """Make room for vectors of these lengths; nothing waits."""
        self._states = [
            SparseState(
                length, chunk=self._config.chunk, momentum=self._config.momentum, device=device
            )
            for length in lengths
        ]

    def sum(self, gradients: Sequence[Tensor], rider: Tensor) -> None:
        """Replace gradients by the sums of their chosen chunks, zero elsewhere, and sum the rider.

        Args:
            gradients: 1-D, one per bucket.
            rider: Float32, 1-D; summed exactly, together with the norms of the chunks.
        """
        self._roll_back()
        self._before = [_copy_of(state) for state in self._states]
        norms = [s.add(g.float()) for s, g in zip(self._states, gradients, strict=True)]
        message = torch.cat([*norms, rider])
        self._reducer.start(message).wait()
        summed, numbers = message.split([len(message) - len(rider), len(rider)])
        rider.copy_(numbers)
        count = math.ceil(self._config.sent(self._epoch()) * len(summed))
        chosen = choose_chunks(summed, count).split([len(each) for each in norms])
        compact = torch.cat(
            [state.take(mask) for state, mask in zip(self._states, chosen, strict=True)]
        )
        self._reducer.start(compact).wait()
        masks = [s.elements(c) for s, c in zip(self._states, chosen, strict=True)]
        parts = compact.split([int(mask.sum()) for mask in masks])
        # Zero, or NaN where a chunk that stays at home is not finite: then no step may count.
        doubt = summed.sum() * 0.0
        for gradient, mask, part in zip(gradients, masks, parts, strict=True):
            gradient.zero_()
            gradient[mask] = part.to(gradient.dtype)
            gradient[:1] += doubt.to(gradient.dtype)

    def commit(self) -> None:
        """What was sent has been applied."""
        self._before = []

    def _roll_back(self) -> None:
        for state, (residual, velocity) in zip(self._states, self._before, strict=False):
            state.residual, state.velocity = residual, velocity
        self._before = []

    def state_dict(self) -> list[dict[str, Any]]:
        """What waits on each worker, in rank order on rank 0. All workers take part."""
        self._roll_back()
        buffer = io.BytesIO()
        own = [
            {
                "residual": s.residual.cpu(),
                "velocity": None if s.velocity is None else s.velocity.cpu(),
            }
            for s in self._states
        ]
        torch.save(own, buffer)
        workers = []
        for rank in range(self._reducer.world_size):
            content = from_rank(self._reducer, buffer.getvalue(), self._reducer.device, rank)
            if self._reducer.rank == 0:
                workers.append({"buckets": torch.load(io.BytesIO(content), weights_only=True)})
        return workers

    def load(self, workers: Sequence[dict[str, Any]] | None) -> list[str]:
        """Go on with what `state_dict` told, dealt out to the workers of today.

        Returns:
            What people should know.
        """
        if not workers:
            return ["reducer.sparse: the checkpoint holds no residuals; they start at zero."]
        lengths = [len(state.residual) for state in self._states]
        saved = [len(each["residual"]) for each in workers[0]["buckets"]]
        if saved != lengths:
            return ["reducer.bucket_mib has changed: what had not been sent is lost."]
        self._before = []
        mine = workers[self._reducer.rank :: self._reducer.world_size]
        for index, state in enumerate(self._states):
            for name in ("residual", "velocity"):
                parts = [worker["buckets"][index][name] for worker in mine]
                target = getattr(state, name)
                if target is not None:
                    target.zero_()
                    for part in parts:
                        if part is not None:
                            target += part.to(target.device)
        return []


def _copy_of(state: SparseState) -> tuple[Tensor, Tensor | None]:
    return state.residual.clone(), None if state.velocity is None else state.velocity.clone()
