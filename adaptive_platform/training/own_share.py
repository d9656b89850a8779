"""This worker's share of each step: taken from the stream, cut as memory allows, cut again."""

from __future__ import annotations

from dataclasses import replace

import torch

from adaptive_platform.collectives import Reducer
from adaptive_platform.data import SampleStream, Share
from adaptive_platform.errors import RunFailedError, UserError
from adaptive_platform.training.memory import halved, largest_of, recut
from adaptive_platform.training.state import RunState

__all__ = ["OwnShare"]


class OwnShare:
    """Takes shares of the next step, and remembers in the state what memory holds.

    Args:
        stream: Samples of this worker.
        state: Says where the run stands.
        reducer: The workers.
        minimum: Fewest samples of a micro-batch that the model can train on.
        microbatch: Most samples of one, as far as the recipe says; None for any.
        together: Workers talk to each other within a pass, so all get equally many micro-batches,
            or none.
    """

    def __init__(
        self,
        stream: SampleStream,
        state: RunState,
        reducer: Reducer,
        *,
        minimum: int,
        microbatch: int | None,
        together: bool = False,
    ) -> None:
        self._stream = stream
        self._state = state
        self._reducer = reducer
        self._minimum = minimum
        self._microbatch = microbatch
        self._together = together
        # A single worker splits its batch, since noise shows only between parts.
        self._at_least = 2 if reducer.world_size == 1 else 1

    @property
    def largest_microbatch(self) -> int | None:
        """Most samples of one pass: the recipe's bound, or what memory was found to hold."""
        bounds = (self._microbatch, self._state.memory_limit)
        return min((bound for bound in bounds if bound is not None), default=None)

    def take(self, consumed: int) -> tuple[Share | None, Exception | None]:
        """The share of a step of `consumed` samples.

        Where workers pass together, one small message asks whether all have what they need.

        An error is returned and not raised, for the vote, so that all workers end together.
        """
        bound = self.largest_microbatch or consumed
        if not self._together:
            return self._taken(consumed, bound, self._at_least)
        pieces = self._equal_pieces(consumed, bound)
        share, fatal = self._taken(consumed, consumed, pieces)
        return self._if_all_have(share, pieces), fatal

    def _if_all_have(self, share: Share | None, pieces: int) -> Share | None:
        """The share where every worker has so many micro-batches; else without any."""
        missing = float(share is None or len(share.microbatches) != pieces)
        short = torch.tensor([missing], device=self._reducer.device)
        self._reducer.all_reduce(short)
        if float(short) == 0.0:
            return share
        if share is not None:  # the step is left out by all
            ids = [microbatch.ids for microbatch in share.microbatches]
            share = replace(
                share, microbatches=[], left_out=torch.cat([*ids, share.left_out.to(torch.int64)])
            )
        return share

    def _equal_pieces(self, consumed: int, bound: int) -> int:
        """Micro-batches of every worker: as few as keep the largest share's within the bound."""
        smallest, more = divmod(consumed, self._reducer.world_size)
        wanted = max(-(-(smallest + (more > 0)) // bound), self._at_least)
        return min(wanted, smallest // self._minimum)

    def _taken(
        self, consumed: int, bound: int, at_least: int
    ) -> tuple[Share | None, Exception | None]:
        progress = self._state.progress
        try:
            return (
                self._stream.take(
                    progress.epoch,
                    progress.cursor,
                    consumed,
                    self._minimum,
                    bound,
                    at_least,
                    self._state.deal,
                ),
                None,
            )
        except (UserError, RunFailedError) as error:
            return None, error

    def smaller(self, share: Share | None, consumed: int) -> Share | None:
        """The same samples in micro-batches of half the size, after memory ran out somewhere.

        Every worker comes to the same size, as it follows from what all of them know.

        Raises:
            RunFailedError: The model can't train on less; on every worker alike.
        """
        if self._reducer.device.type == "cuda":
            torch.cuda.empty_cache()
        bound = self.largest_microbatch or consumed
        if self._together:
            return self._smaller_together(share, consumed, self._equal_pieces(consumed, bound))
        largest = self._largest(consumed, bound, self._at_least)
        limit = self._state.memory_limit = halved(largest, self._minimum)
        if share is None:
            return None
        cut = recut(share.microbatches, limit, self._minimum, self._at_least)
        return replace(share, microbatches=cut)

    def _smaller_together(self, share: Share | None, consumed: int, pieces: int) -> Share | None:
        """In more pieces, of which all have equally many again."""
        largest = self._largest(consumed, consumed, pieces)
        # The smallest share may be in as many pieces as it has room for; then so are all.
        can_split = pieces < consumed // self._reducer.world_size // self._minimum
        limit = halved(largest, self._minimum if can_split else largest)
        self._state.memory_limit = limit
        pieces = self._equal_pieces(consumed, limit)
        if share is not None:
            cut = recut(share.microbatches, consumed, self._minimum, pieces)
            share = replace(share, microbatches=cut)
        return self._if_all_have(share, pieces)

    def _largest(self, consumed: int, bound: int, at_least: int) -> int:
        """Samples of the largest micro-batch of any worker."""
        return largest_of(
            self._reducer.world_size,
            self._state.progress.cursor,
            consumed,
            bound,
            minimum=self._minimum,
            at_least=at_least,
            deal=self._state.deal,
        )

    def close(self) -> None:
        """End the decode processes."""
        self._stream.close()
