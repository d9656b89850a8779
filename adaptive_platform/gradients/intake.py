"""Moves fresh gradients into their buckets a few at a time, while they are still in the cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from adaptive_platform.errors import UserError
from adaptive_platform.gradients.layout import Bucket
from adaptive_platform.gradients.norms import Norms
from adaptive_platform.gradients.shards import Shards

__all__ = ["Intake"]

_CACHED_BYTES = 1 << 20
"""Gradients that a CPU lets come together before it takes them in.

Backward has just written them, so their norm and their copy read the cache and not the memory.
"""


class Intake:
    """Takes gradients away from parameters as backward leaves them there.

    Args:
        buckets: Where they go.
        norms: Measures them.
        shards: Takes their squares in where it needs them; None where nobody does.
    """

    def __init__(self, buckets: Sequence[Bucket], norms: Norms, shards: Shards | None) -> None:
        self._buckets = buckets
        self._norms = norms
        self._shards = shards
        self._place_of = {
            id(parameter): (index, place)
            for index, bucket in enumerate(buckets)
            for place, parameter in enumerate(bucket.parameters)
        }
        self.used: set[int] = set()
        """`id` of each parameter that had a gradient in this step."""
        self._first = False
        self._square_weight = 0.0

    def begin_step(self) -> None:
        """Forget the step before."""
        self.used.clear()

    def begin_microbatch(self, *, first: bool, square_weight: float) -> None:
        """Expect one backward pass.

        Args:
            first: It overwrites what the buckets hold.
            square_weight: Factor on its squares.
        """
        self._first = first
        self._square_weight = square_weight
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)
            bucket.fired.clear()
            bucket.fresh.clear()
            bucket.fresh_bytes = 0

    def arrived(self, parameter: Tensor) -> bool:
        """A gradient is there.

        Returns:
            True when its bucket has become full.
        """
        index, place = self._place_of[id(parameter)]
        bucket = self._buckets[index]
        if place in bucket.fired:
            return False
        bucket.fired.add(place)
        bucket.fresh.append(place)
        bucket.fresh_bytes += parameter.numel() * parameter.element_size()
        bucket.missing -= 1
        cached = bucket.fresh_bytes >= _CACHED_BYTES and parameter.device.type == "cpu"
        if cached or not bucket.missing:
            self._take(index)
        return not bucket.missing

    def end_microbatch(self) -> None:
        """Fill buckets with parameters that got no gradient."""
        for index, bucket in enumerate(self._buckets):
            if not bucket.missing:
                continue
            self._take(index)
            bucket.missing = 0
            absent = [place for place in range(len(bucket.views)) if place not in bucket.fired]
            if self._first:
                for place in absent:
                    bucket.views[place].zero_()
                if self._shards is not None:
                    self._shards.clear_squares_of(index, absent)

    def _take(self, index: int) -> None:
        """Measure the fresh gradients of a bucket and move them there."""
        bucket = self._buckets[index]
        # In the order of memory, since backward has a layer's weight and bias the other way round.
        places = sorted(bucket.fresh)
        bucket.fresh.clear()
        bucket.fresh_bytes = 0
        gradients = []
        for place in places:
            parameter = bucket.parameters[place]
            gradient = parameter.grad
            assert gradient is not None
            if gradient.is_sparse:
                raise UserError(
                    f"model: parameter `{bucket.names[place]}` has a sparse gradient, which can't "
                    "be reduced together with the others. Build its embedding with sparse=False."
                )
            gradients.append(gradient)
            parameter.grad = None
            self.used.add(id(parameter))
        if not gradients:
            return
        # Before the copy: on a CPU it then finds the gradients in the cache.
        self._norms.take(bucket, places, gradients)
        views = [bucket.views[place] for place in places]
        if self._first:
            torch._foreach_copy_(views, gradients)
        else:
            torch._foreach_add_(views, gradients)
        if self._shards is not None:
            self._shards.add_squares(
                index, places, gradients, self._square_weight, first=self._first
            )
