"""When and how sparsely gradients travel: the settings of coarse-grained sparse communication."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from adaptive_platform.settings import Settings

__all__ = ["SparseConfig", "sparsity"]


class SparseConfig(Settings):
    """Only the chunks that matter travel; the rest waits (Sun et al. 2019, arXiv 1902.06855).

    All workers agree on the chunks by their summed L1 norms, which travel with the counts of the
    step. Momentum is applied here, before the choice, so that what travels late arrives with the
    momentum it would have had; the optimizer has none of its own. Its weight decay acts on all
    elements in every step, outside of the velocity. Nothing overlaps with backward,
    as the choice needs the whole gradient.
    """

    chunk: int = Field(32_768, ge=1)
    """Elements per chunk."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """Share of the old velocity that stays in a step, in the place of the optimizer's momentum."""
    dense_epochs: float = Field(5.0, ge=0)
    """First epochs, in which everything travels: then it is SGD with momentum."""
    sparsities: tuple[float, ...] = Field((0.5, 0.75, 0.85), min_length=1)
    """Parts of the chunks that stay at home in the epochs after those, one epoch each; the last
    holds to the end. In [0, 1)."""

    def sent(self, epoch: float) -> float:
        """Part of the chunks that travels at a time in epochs."""
        return 1.0 - sparsity(epoch, self.dense_epochs, self.sparsities)


def sparsity(
    epoch: float, dense_epochs: float = 5.0, steps: Sequence[float] = (0.5, 0.75, 0.85)
) -> float:
    """Part of the chunks that stays at home: none at first, then one step more every epoch."""
    if epoch < dense_epochs:
        return 0.0
    return steps[min(int(epoch - dense_epochs), len(steps) - 1)]
