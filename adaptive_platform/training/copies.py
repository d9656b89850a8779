"""This worker's copy of the model among the others': link, agreed weights, and private state."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from adaptive_platform.collectives import Membership, Reducer
from adaptive_platform.optimizers import load_named_state, named_state
from adaptive_platform.sync import FlatWeights, Peers, SyncConfig, SyncStrategy
from adaptive_platform.training.subgroups import Subgroups
from adaptive_platform.training.unison import from_rank

__all__ = ["Copies"]


class Copies:
    """What the loop asks of the synchronisation strategy, on one worker.

    Args:
        config: Which strategy.
        model: This worker's copy.
        optimizer: Its optimizer; its state may be private.
        reducer: All workers.
        membership: Says who shares a node; workers of unknown nodes are taken to share one.
        subgroups: Makes the link among those, when it is first used.
        seed: Of the run.
    """

    def __init__(
        self,
        config: SyncConfig,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        reducer: Reducer,
        membership: Membership,
        subgroups: Subgroups,
        *,
        seed: int,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._reducer = reducer
        self._weights = FlatWeights(model.parameters())
        self._config = config
        self._seed = seed
        self._peers = Peers(
            rank=reducer.rank,
            world_size=reducer.world_size,
            sum=lambda tensor: reducer.start(tensor).wait(),
            sum_on_node=_NodeSum(membership, subgroups),
            exchange=reducer.exchange,
        )
        self.strategy: SyncStrategy = config.build(self._weights, self._peers, seed=seed)

    def begin(self) -> None:
        """Start from the weights as they are now, equal on all workers."""
        self.strategy = self._config.build(self._weights, self._peers, seed=self._seed)

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """The model holds the weights to score and to save meanwhile, alike on all workers."""
        agreed = self.strategy.agreed()
        if agreed is None:
            yield
            return
        own = self._weights.read()
        self._weights.write(agreed)
        try:
            yield
        finally:
            self._weights.write(own)

    def state_dict(self) -> dict[str, Any] | None:
        """For a checkpoint; all workers take part. None where copies never differ.

        `common` is alike on all workers; `workers` holds each one's weights, optimizer state and
        counters in rank order, on rank 0 only.
        """
        if not self._config.lets_copies_differ:
            return None
        own = {
            "weights": self._weights.read().cpu(),
            "optimizer": named_state(self._optimizer, self._model.named_parameters()),
            "counters": self.strategy.own_state(),
        }
        buffer = io.BytesIO()
        torch.save(own, buffer)
        device = self._reducer.device
        workers: list[Any] = []
        for rank in range(self._reducer.world_size if self.strategy.copies_differ else 0):
            content = from_rank(self._reducer, buffer.getvalue(), device, rank)
            if self._reducer.rank == 0:
                workers.append(torch.load(io.BytesIO(content), weights_only=True))
        return {
            "kind": self._config.kind,
            "common": self.strategy.state_dict(),
            "workers": workers,
        }

    def load(self, saved: Mapping[str, Any] | None) -> list[str]:
        """Go on from `state_dict`, after model and optimizer hold what is alike on all workers.

        With as many workers as before each takes its own copy up again, so that the next step is
        the same bits. With another number all start from the agreed weights.

        Returns:
            What people should know.
        """
        self.begin()
        if saved is None or saved["kind"] != self._config.kind:
            return []
        self.strategy.load_state_dict(saved["common"])
        workers = saved["workers"]
        if not workers:
            return []
        if len(workers) != self._reducer.world_size:
            return [
                f"sync.kind = {self._config.kind}: the {len(workers)} copies of the checkpoint go "
                "on from their agreed weights, as the number of workers changed."
            ]
        own = workers[self._reducer.rank]
        self._weights.write(own["weights"].to(self._reducer.device))
        load_named_state(self._optimizer, self._model.named_parameters(), own["optimizer"])
        self.strategy.load_own_state(own["counters"])
        return []


class _NodeSum:
    """Replaces a 1-D tensor by its sum over this node's workers."""

    def __init__(self, membership: Membership, subgroups: Subgroups) -> None:
        nodes = membership.node_of_rank or ("one",) * membership.world_size
        self._ranks = [rank for rank, node in enumerate(nodes) if node == nodes[membership.rank]]
        self._subgroups = subgroups
        self._reducer: Reducer | None = None

    def __call__(self, tensor: torch.Tensor) -> None:
        if self._reducer is None:
            self._reducer = self._subgroups.among(self._ranks)
        self._reducer.start(tensor).wait()
