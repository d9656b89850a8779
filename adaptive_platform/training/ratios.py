"""VRGD in the loop: ratios are made, kept and applied where the summed gradient has one owner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from adaptive_platform.collectives import Pending, Reducer
from adaptive_platform.gradients.buckets import GradientBuckets
from adaptive_platform.gradients.layout import Portion
from adaptive_platform.gradients.shards import Reshape, Shard, Shards
from adaptive_platform.statistics import VarianceReduction
from adaptive_platform.statistics.gsnr import gsnr_in_place
from adaptive_platform.training.telling import Teller

__all__ = ["Ratios", "ReducerHalves"]


class ReducerHalves:
    """A reducer's halves as buckets want them.

    Args:
        reducer: All workers.
        wire: Type of gradients between workers; None for their own.
    """

    def __init__(self, reducer: Reducer, wire: torch.dtype | None) -> None:
        self._reducer = reducer
        self._wire = wire if reducer.world_size > 1 else None

    def shard(self, length: int) -> tuple[int, int]:
        """What this worker owns."""
        span = self._reducer.shard(length)
        return span.start, span.stop

    def start(self, buffer: Tensor, visit: Callable[[Tensor], None]) -> Pending:
        """Both halves with a visit in between."""
        return self._reducer.start(buffer, self._narrower(buffer), visit=visit)

    def narrow(self, part: Tensor) -> None:
        """Round a part to the type between workers."""
        wire = self._narrower(part)
        if wire is not None:
            part.copy_(part.to(wire))

    def scatter(self, buffer: Tensor, *, exact: bool = False) -> Pending:
        """The first half."""
        return self._reducer.scatter(buffer, None if exact else self._narrower(buffer))

    def gather(self, buffer: Tensor, *, exact: bool = False) -> Pending:
        """The second half."""
        return self._reducer.gather(buffer, None if exact else self._narrower(buffer))

    def _narrower(self, buffer: Tensor) -> torch.dtype | None:
        wire = self._wire
        return wire if wire is not None and buffer.itemsize > wire.itemsize else None


class Ratios:
    """What VRGD does to a step's gradients, between the halves of their reduction.

    Args:
        variance: The ratios.
        buckets: Made with halves.
        reducer: All workers.
        tell: Hears where ratios could not be taken.
        step: Number of the optimizer step in hand.
    """

    def __init__(
        self,
        variance: VarianceReduction,
        buckets: GradientBuckets,
        reducer: Reducer,
        tell: Teller,
        step: Callable[[], int],
    ) -> None:
        assert buckets.shards is not None
        variance.forget_shards()
        self._variance = variance
        self._shards: Shards = buckets.shards
        self._reducer = reducer
        self._tell = tell
        self._step = step
        self._agreed = reducer.world_size == 1
        sizes = torch.tensor([float(p.numel()) for p in buckets.parameters_of_sums])
        self._layer_sizes = sizes.to(reducer.device)
        longest = max((p.stop - p.start for s in self._shards.all for p in s.portions), default=0)
        self._scratch = torch.empty(longest, device=reducer.device)

    def begin(self, *, refreshing: bool) -> Reshape | None:
        """Before a step: what changes shards on their way, which is nothing in a refresh."""
        if not self._agreed:
            # Somebody may have been lost while ratios were on their way to all.
            told = self._reducer.all_gather_object(self._variance.whole is not None)
            if not all(told):
                self._variance.whole = None
                self._variance.forget_shards()
            self._agreed = True
        if self._variance.whole is not None:
            self._variance.deal_out(self._shards.spread(self._variance.whole))
        return self._variance.apply if self._variance.known and not refreshing else None

    def refresh(self, num_microbatches: int, scale: float) -> None:
        """In a step with squares, once its norms and counts are known. All workers take part.

        Args:
            num_microbatches: Of all workers.
            scale: Times the squared gradient is to the squares as the squared mean is to the mean
                square.
        """
        variance, shards, means = self._variance, self._shards.all, None
        if num_microbatches < 2:
            self._tell.warn_once(
                "vr: held in steps of one micro-batch, as a variance needs two; use more "
                "workers or a smaller microbatch"
            )
        else:
            means = self._layer_means(scale).unbind()
            variance.begin_refresh(self._step(), [shard.squares for shard in shards])
        if variance.known:
            for index, shard in enumerate(shards):
                for portion in shard.portions:
                    if means is not None:
                        variance.take(index, portion.start, self._ratios(shard, portion, means))
                    part = shard.gradient[portion.start : portion.stop]
                    variance.apply(index, portion.start, part)
        self._shards.gather()

    def give_up(self) -> None:
        """The same for a step that will not count: only make the gradients whole."""
        self._shards.gather()

    def make_whole(self) -> None:
        """Bring all ratios to all workers, between two steps. All workers take part."""
        if self._variance.whole is None and self._variance.known:
            self._variance.whole = self._shards.collect(self._variance.averages)

    def state_dict(self) -> dict[str, Any]:
        """All ratios for a checkpoint; the shards are kept all along. All workers take part."""
        self.make_whole()
        saved = self._variance.state_dict()
        if self._variance.averages:
            self._variance.whole = None
        return saved

    def load(self, saved: dict[str, Any] | None) -> list[str]:
        """Go on from `state_dict`, with any number of workers."""
        if saved is not None:  # older checkpoints have them with what is the same on all workers
            self._variance.load_state_dict(saved, self._reducer.device)
        return []

    @torch.no_grad()
    def _layer_means(self, scale: float) -> Tensor:
        """The mean GSNR of each layer over all workers; that of an element replaces its square."""
        sums = torch.zeros_like(self._layer_sizes)
        for shard in self._shards.all:
            found = []
            for portion in shard.portions:
                gsnr = shard.squares[portion.start : portion.stop]
                part = shard.gradient[portion.start : portion.stop]
                gsnr_in_place(part, gsnr, scale, self._scratch)
                found += [piece.of(gsnr).sum() for piece in portion.pieces]
            if found:
                sums.index_add_(0, shard.layers, torch.stack(found))
        self._reducer.start(sums).wait()
        return (sums / self._layer_sizes).clamp_(min=torch.finfo(torch.float32).tiny)

    @staticmethod
    @torch.no_grad()
    def _ratios(shard: Shard, portion: Portion, means: Sequence[Tensor]) -> Tensor:
        """Over the layers' means, where `_layer_means` has left them."""
        gsnr = shard.squares[portion.start : portion.stop]
        for piece in portion.pieces:
            piece.of(gsnr).div_(means[shard.bucket.first_layer + piece.index])
        return gsnr
