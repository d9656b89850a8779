"""This worker's copy of the model among the others': link, agreed weights, and private state."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._C._distributed_c10d import PrefixStore

from adaptive_platform.collectives import Membership, Reducer, RingConfig
from adaptive_platform.optimizers import load_named_state, named_state
from adaptive_platform.sync import FlatWeights, Peers, SyncConfig, SyncStrategy
from adaptive_platform.training.unison import from_rank

__all__ = ["Copies", "NodeReducer"]


class NodeReducer:
    """Sums over the workers of one node, for strategies that average there; made when first used.

    All workers of a node call it in the same order.

    Args:
        membership: All workers; those of unknown nodes are taken to be on one.
        timeout_seconds: Longest wait for another worker.
        device: Where tensors live.
    """

    def __init__(
        self, membership: Membership, timeout_seconds: float, device: torch.device
    ) -> None:
        self._membership = membership
        self._timeout_seconds = timeout_seconds
        self._device = device
        self._reducer: Reducer | None = None

    def sum(self, tensor: torch.Tensor) -> None:
        """Replace a 1-D tensor by its sum over this node's workers."""
        if self._reducer is None:
            self._reducer = self._connect()
        self._reducer.start(tensor).wait()

    def _connect(self) -> Reducer:
        whole = self._membership
        nodes = whole.node_of_rank or ("one",) * whole.world_size
        ranks = [rank for rank, node in enumerate(nodes) if node == nodes[whole.rank]]
        own = Membership(
            PrefixStore(f"node-of-{ranks[0]}", whole.store),
            ranks.index(whole.rank),
            len(ranks),
            whole.generation,
        )
        config = RingConfig(timeout_seconds=self._timeout_seconds)
        return Reducer(config, own, self._device)

    def close(self) -> None:
        """Give connections back, where there are any."""
        if self._reducer is not None:
            self._reducer.close()


class Copies:
    """What the loop asks of the synchronisation strategy, on one worker.

    Args:
        config: Which strategy.
        model: This worker's copy.
        optimizer: Its optimizer; its state may be private.
        reducer: All workers.
        node: The workers of this node.
        seed: Of the run.
    """

    def __init__(
        self,
        config: SyncConfig,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        reducer: Reducer,
        node: NodeReducer,
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
            sum_on_node=node.sum,
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
