"""Each worker's own part of the summed gradient, visited between the two halves of its reduction.

What is done element by element with the sum is then done once among all workers, and what it needs
besides the sum, such as summed squares, never has to come to everyone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from adaptive_platform.gradients.contracts import Halves, Pending
from adaptive_platform.gradients.layout import (
    Bucket,
    Piece,
    Portion,
    memory_view,
    pieces_of,
    portions_of,
    views_of,
)
from adaptive_platform.gradients.norms import Norms

__all__ = ["Reshape", "Shard", "Shards"]

Reshape = Callable[[int, int, Tensor], None]
"""Changes a portion of the shard of a bucket, 1-D, in place; maybe on another thread.

It is handed the index of the bucket, the portion's first element in the shard, and its elements."""

_LONGEST = 1 << 18
"""Elements that a CPU looks at one after the other, so that they stay in cache meanwhile."""


@dataclass(slots=True)
class Shard:
    """What this worker owns of one bucket."""

    bucket: Bucket
    start: int
    stop: int
    pieces: list[Piece]
    portions: list[Portion]
    """Its elements in the order in which they are worked on; one portion on an accelerator."""
    places: Tensor
    """Place in the bucket of the parameter of each piece of each portion."""
    found: Tensor
    """Float32 (2 + parameters of the bucket,): squared norms, as of `Norms.add_portions`."""
    whole_squares: Tensor | None = None
    """Float32, all elements of the bucket: this worker's squares until they are summed."""
    square_views: list[Tensor] = field(default_factory=list)

    @property
    def gradient(self) -> Tensor:
        """The shard of the summed gradient, 1-D."""
        return self.bucket.gradient[self.start : self.stop]

    @property
    def squares(self) -> Tensor:
        """The shard of the summed squares, 1-D float32; free to be overwritten."""
        assert self.whole_squares is not None
        return self.whole_squares[self.start : self.stop]

    @property
    def layers(self) -> Tensor:
        """Layer of each piece of each portion, in the order of the buckets."""
        return self.places + self.bucket.first_layer


class Shards:
    """Sends buckets in halves and keeps what belongs to the shards.

    Args:
        buckets: Those with gradients.
        halves: Sums over all workers.
        norms: Measures the sum.
    """

    def __init__(self, buckets: Sequence[Bucket], halves: Halves, norms: Norms) -> None:
        self._halves = halves
        self._norms = norms
        self._reshape: Reshape | None = None
        self._takes_squares = False
        self._visit_seconds = 0.0
        self._zero = torch.zeros((), device=buckets[0].flat.device)
        self.all: list[Shard] = []
        for bucket in buckets:
            start, stop = halves.shard(bucket.gradient.numel())
            device = bucket.flat.device
            pieces = pieces_of(bucket, start, stop)
            longest = _LONGEST if device.type == "cpu" else max(1, stop - start)
            portions = portions_of(pieces, longest)
            places = [piece.index for portion in portions for piece in portion.pieces]
            self.all.append(
                Shard(
                    bucket=bucket,
                    start=start,
                    stop=stop,
                    pieces=pieces,
                    portions=portions,
                    places=torch.tensor(places, dtype=torch.long, device=device),
                    found=torch.zeros(2 + len(bucket.parameters), device=device),
                )
            )

    def begin_step(self, *, squares: bool, reshape: Reshape | None) -> None:
        """Expect a step.

        Args:
            squares: Take squares too; halves are then left to `gather`, and `reshape` to whoever
                looks at the squares.
            reshape: What happens to each shard before it goes to the others.
        """
        self._takes_squares = squares
        self._reshape = None if squares else reshape
        self._visit_seconds = 0.0
        for shard in self.all if squares else ():
            if shard.whole_squares is None:
                # Kept: giving the memory back and asking for it anew costs more than the squares.
                shard.whole_squares = torch.empty(
                    shard.bucket.gradient.shape,
                    dtype=torch.float32,
                    device=shard.bucket.flat.device,
                )
                shard.square_views = views_of(shard.whole_squares, shard.bucket.parameters)

    def add_squares(
        self,
        index: int,
        present: Sequence[int],
        gradients: list[Tensor],
        weight: float,
        *,
        first: bool,
    ) -> None:
        """Take in the squares of a micro-batch, once its gradients are in the bucket.

        Args:
            index: Of the bucket.
            present: Places of some of its parameters there.
            gradients: Theirs.
            weight: Factor on the squares.
            first: The bucket holds nothing but this micro-batch.
        """
        if not self._takes_squares:
            return
        started = time.perf_counter()
        shard = self.all[index]
        if first and len(present) == len(shard.bucket.parameters):
            flat, squares = shard.bucket.gradient, shard.whole_squares
            assert squares is not None
            flat = flat if flat.dtype is torch.float32 else flat.float()
            torch.addcmul(self._zero, flat, flat, value=weight, out=squares)
            self._norms.seconds += time.perf_counter() - started
            return
        gradients = [g if g.dtype is torch.float32 else g.float() for g in gradients]
        views = [shard.square_views[i] for i in present]
        if first:
            for view, gradient in zip(views, gradients, strict=True):
                torch.addcmul(self._zero, gradient, gradient, value=weight, out=view)
        else:
            torch._foreach_addcmul_(views, gradients, gradients, weight)
        self._norms.seconds += time.perf_counter() - started

    def clear_squares(self) -> None:
        """This worker has none in this step."""
        for shard in self.all if self._takes_squares else ():
            assert shard.whole_squares is not None
            shard.whole_squares.zero_()

    def clear_squares_of(self, index: int, absent: Sequence[int]) -> None:
        """It has none of the parameters at these places of the bucket with that index."""
        for place in absent if self._takes_squares else ():
            self.all[index].square_views[place].zero_()

    def launch(self, index: int) -> list[Pending]:
        """Send a full bucket, and its squares where they are taken."""
        shard = self.all[index]
        if not self._takes_squares:
            return [self._halves.start(shard.bucket.flat, partial(self._visit, index))]
        assert shard.whole_squares is not None
        return [
            self._halves.scatter(shard.bucket.flat),
            self._halves.scatter(shard.whole_squares, exact=True),
        ]

    def measured(self, num_layers: int) -> Tensor:
        """This worker's share of the sum's norms, once all that was sent has come.

        Returns:
            Float32 (2 + num_layers,): plain, as micro-batches are measured, and of each layer.
        """
        started = time.perf_counter()
        total = torch.zeros(2 + num_layers, device=self.all[0].found.device)
        for index, shard in enumerate(self.all):
            if self._takes_squares:
                self._look(index, shard.gradient)
            total[:2] += shard.found[:2]
            if num_layers:
                first = 2 + shard.bucket.first_layer
                total[first : first + len(shard.bucket.parameters)] = shard.found[2:]
        self._norms.seconds += time.perf_counter() - started + self._visit_seconds
        return total

    def gather(self) -> None:
        """The second half, after a step with squares: all shards come to everyone."""
        for pending in [self._halves.gather(shard.bucket.flat) for shard in self.all]:
            pending.wait()

    @torch.no_grad()
    def spread(self, whole: Mapping[str, Tensor]) -> list[Tensor]:
        """This worker's shards, float32, of something with one value per element.

        Args:
            whole: By name of the parameter, in its shape.
        """
        spread = []
        for shard in self.all:
            part = torch.empty(shard.stop - shard.start, device=shard.bucket.flat.device)
            for piece in shard.pieces:
                parameter = shard.bucket.parameters[piece.index]
                flat = torch.empty(parameter.numel(), device=part.device)
                memory_view(flat, parameter).copy_(whole[shard.bucket.names[piece.index]])
                piece.of(part).copy_(flat[piece.start : piece.start + piece.length])
            spread.append(part)
        return spread

    @torch.no_grad()
    def collect(self, parts: Sequence[Tensor]) -> dict[str, Tensor]:
        """The inverse of `spread`, on all workers, who call it together between two steps."""
        whole = {}
        for shard, part in zip(self.all, parts, strict=True):
            flat = torch.zeros(shard.bucket.gradient.shape, device=shard.bucket.flat.device)
            flat[shard.start : shard.stop] = part
            self._halves.gather(flat, exact=True).wait()
            for name, view in zip(
                shard.bucket.names, views_of(flat, shard.bucket.parameters), strict=True
            ):
                whole[name] = view.clone()
        return whole

    def _visit(self, index: int, own: Tensor) -> None:
        started = time.perf_counter()
        self._look(index, own)
        self._visit_seconds += time.perf_counter() - started

    @torch.no_grad()
    def _look(self, index: int, own: Tensor) -> None:
        """Measure a shard of the sum and change it, portion by portion."""
        shard, found = self.all[index], []
        # As others will see it: what does not fit into a narrower type must be noticed here.
        self._halves.narrow(own)
        for portion in shard.portions:
            part = own[portion.start : portion.stop]
            found.append(self._norms.of_portion(shard.bucket, part, portion.pieces))
            if self._reshape is not None:
                self._reshape(index, portion.start, part)
        self._norms.add_portions(found, shard.places, shard.found)
