"""Coarse-grained sparse sums: only the chunks that matter travel (Sun et al. 2019, 1902.06855).

Every worker keeps what it has not sent yet. In each step all agree on the chunks whose L1 norms,
summed over the workers, are the largest, and sum these densely in one compact buffer. Since all
choose from the same sums, no index is exchanged and the message stays as short for many workers.

What is not promised: a chunk can wait for ever while others are larger. Send all chunks now and
then, or during the first epochs, as the paper does (`sparse_config.sparsity`).
"""

from __future__ import annotations

import torch

from adaptive_platform.collectives.reducer import Reducer

__all__ = ["SparseState", "choose_chunks", "sparse_sum"]


class SparseState:
    """What one worker has not sent yet.

    With momentum, velocities are summed rather than vectors, so that what arrives late arrives
    with the momentum it would have had; the optimizer behind must then use none of its own.

    Args:
        length: Elements of the vector.
        chunk: Elements per chunk; the last one may be shorter.
        momentum: Of the optimizer, 0 for none.
        device: Where the vectors live.

    Attributes:
        residual: Not sent yet, shape `(length,)`; a worker that leaves takes it along.
        velocity: Shape `(length,)`; None without momentum.
    """

    def __init__(
        self,
        length: int,
        *,
        chunk: int = 32_768,
        momentum: float = 0.0,
        device: torch.device | str = "cpu",
    ) -> None:
        if chunk < 1:
            raise ValueError(f"chunk = {chunk}: must be at least 1")
        if not 0.0 <= momentum < 1.0:
            raise ValueError(f"momentum = {momentum}: must be in [0, 1)")
        self.chunk = chunk
        self.momentum = momentum
        self.residual = torch.zeros(length, device=device)
        self.velocity = torch.zeros(length, device=device) if momentum else None

    @property
    def num_chunks(self) -> int:
        """Chunks of the vector."""
        return -(-self.residual.numel() // self.chunk)

    def add(self, vector: torch.Tensor) -> torch.Tensor:
        """Take in this step's vector.

        Returns:
            L1 norm of what waits in each chunk, shape `(num_chunks,)`.
        """
        if self.velocity is None:
            self.residual += vector
        else:
            self.velocity.mul_(self.momentum).add_(vector)
            self.residual += self.velocity
        padding = self.num_chunks * self.chunk - self.residual.numel()
        padded = torch.nn.functional.pad(self.residual.abs(), (0, padding))
        return padded.view(self.num_chunks, self.chunk).sum(dim=1)

    def take(self, chosen: torch.Tensor) -> torch.Tensor:
        """Remove the chosen chunks from what waits.

        Args:
            chosen: Truth per chunk, shape `(num_chunks,)`.

        Returns:
            Their elements in order, 1-D.
        """
        mask = self.elements(chosen)
        compact = self.residual[mask]
        self.residual[mask] = 0.0
        return compact

    def elements(self, chosen: torch.Tensor) -> torch.Tensor:
        """Truth per element, shape `(length,)`, from truth per chunk."""
        return chosen.repeat_interleave(self.chunk)[: self.residual.numel()]


def choose_chunks(norms: torch.Tensor, count: int) -> torch.Tensor:
    """Truth per chunk: the `count` largest norms, among equals those with the lowest index."""
    order = torch.argsort(norms, descending=True, stable=True)
    chosen = torch.zeros_like(norms, dtype=torch.bool)
    chosen[order[:count]] = True
    return chosen


def sparse_sum(
    state: SparseState, vector: torch.Tensor, reducer: Reducer, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum the `count` most important chunks over all workers, who call this together.

    Args:
        state: This worker's; changed.
        vector: This step's, shape `(length,)`; divided by the number of workers for an average.
        reducer: Between the workers.
        count: Chunks to send; all of them make it the plain sum of what waits.

    Returns:
        The sum, zero where nothing was sent, and the truth per element of what was: only these
        elements may be updated, weight decay and momentum included.
    """
    norms = reducer.all_reduce(state.add(vector))
    chosen = choose_chunks(norms, count)
    compact = state.take(chosen)
    reducer.start(compact).wait()
    mask = state.elements(chosen)
    total = torch.zeros_like(state.residual)
    total[mask] = compact
    return total, mask
