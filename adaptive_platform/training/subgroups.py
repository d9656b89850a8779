"""Links among some of the workers, each with process groups of its own, made when asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch._C._distributed_c10d import PrefixStore

from adaptive_platform.collectives import Membership, Reducer
from adaptive_platform.collectives.ring import RingConfig
from adaptive_platform.optimizers import Exchange

__all__ = ["Subgroups"]


class Subgroups:
    """Reducers of parts of a membership; messages in one never wait for those in another.

    Args:
        membership: All workers.
        device: Where buffers live.
        timeout_seconds: Limit of each operation.
        resources: Closes the reducers.
    """

    def __init__(
        self,
        membership: Membership,
        device: torch.device,
        timeout_seconds: float,
        resources: ExitStack,
    ) -> None:
        self._membership = membership
        self._device = device
        self._config = RingConfig(timeout_seconds=timeout_seconds)
        self._resources = resources
        self._made: Counter[tuple[int, ...]] = Counter()
        self._reducers: list[Reducer] = []

    @property
    def bytes_sent(self) -> int:
        """Bytes that this worker put on the wire in all of them."""
        return sum(reducer.bytes_sent for reducer in self._reducers)

    def among(self, ranks: Sequence[int]) -> Reducer:
        """The link among `ranks`, this worker included; all of `ranks` call it equally often.

        Raises:
            CollectiveError: A member did not join within the time limit.
        """
        whole, key = self._membership, tuple(ranks)
        self._made[key] += 1
        nodes = whole.node_of_rank
        name = f"subgroup/{'-'.join(map(str, key))}/{self._made[key]}"
        part = Membership(
            PrefixStore(name, whole.store),
            key.index(whole.rank),
            len(key),
            whole.generation,
            tuple(nodes[rank] for rank in key) if nodes else None,
        )
        reducer = Reducer(self._config, part, self._device)
        self._resources.callback(reducer.close)
        self._reducers.append(reducer)
        return reducer

    def exchange(self, ranks: Sequence[int]) -> Exchange:
        """The same for an optimizer."""
        made = self.among(ranks)
        return Exchange(
            made.rank, made.world_size, made.all_reduce, made.broadcast, made.all_gather
        )
