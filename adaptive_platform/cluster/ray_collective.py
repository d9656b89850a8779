"""`TORUS` as a backend of `ray.util.collective`: the platform's reductions for plain Ray actors.

```python
register_torus_backend()                     # in every process that names the backend
init_collective_group(4, rank, "TORUS", "g") # in each actor
allreduce(tensor, "g")
```

Sums only; `allreduce`, `reduce`, `reducescatter`, `allgather`, `broadcast` and `barrier` on torch
tensors and numpy arrays. A lost worker ends the operation on all others with a `CollectiveError`;
destroy the group then and make it again with those who are left.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, ClassVar

import numpy as np
import ray
import ray.experimental.internal_kv as internal_kv
import torch
from ray.util.collective import register_collective_backend
from ray.util.collective.backend_registry import BackendRegistry
from ray.util.collective.collective_group.base_collective_group import BaseGroup
from ray.util.collective.types import ReduceOp
from torch._C._distributed_c10d import TCPStore

from adaptive_platform.collectives import Membership, Reducer, ReducerConfig, TorusConfig
from adaptive_platform.errors import RunFailedError, UserError

__all__ = ["TorusGroup", "register_torus_backend"]

_NAME = "TORUS"
_ATTEMPT_SECONDS = 2.0


def register_torus_backend() -> None:
    """Make `backend="TORUS"` known to Ray in this process; again is harmless."""
    if not BackendRegistry().is_registered(_NAME):
        register_collective_backend(_NAME, TorusGroup)


class TorusGroup(BaseGroup):
    """One worker's part in a collective group.

    Rows of the torus are the workers of one Ray node. For other settings, or another plan, make a
    subclass with its own `config` and register that under a name of its own.

    Args:
        world_size: Number of workers.
        rank: This one.
        group_name: The same on all of them; in use once at a time in a cluster.

    Raises:
        RunFailedError: The others did not come within `config.timeout_seconds`.
    """

    config: ClassVar[ReducerConfig] = TorusConfig()

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        self._address_key = f"adaptive_platform/collective_group/{group_name}"
        self._store = self._meet()
        self._reducers: dict[str, Reducer] = {}
        nodes = self._nodes()
        # One generation per kind of device; that of the CPU also proves that everyone is there.
        self._memberships = {
            device: Membership(self._store, rank, world_size, generation, nodes)
            for generation, device in enumerate(("cpu", "cuda"))
        }
        self._reducer(torch.device("cpu"))
        if rank == 0:
            internal_kv._internal_kv_del(self._address_key)

    @classmethod
    def backend(cls) -> str:
        """Ray's name for it."""
        return _NAME

    @classmethod
    def check_backend_availability(cls) -> bool:
        """Gloo is part of every torch that has `distributed`."""
        return torch.distributed.is_available()

    def destroy_group(self) -> None:
        """Give back connections and threads."""
        for reducer in self._reducers.values():
            reducer.close()
        self._reducers.clear()

    def allreduce(self, tensor: list[Any], allreduce_options: Any = None) -> None:
        """Sum over all workers, in place, by the plan."""
        _only_sums(allreduce_options)
        self._sum(_as_tensor(tensor))

    def reduce(self, tensor: list[Any], reduce_options: Any = None) -> None:
        """Sum in place on `root_rank`; the others keep what they had. Costs an all-reduce."""
        _only_sums(reduce_options)
        root = 0 if reduce_options is None else reduce_options.root_rank
        own = _as_tensor(tensor)
        summed = own if self.rank == root else own.clone()
        self._sum(summed)

    def reducescatter(
        self, tensor: list[Any], tensor_list: list[list[Any]], reducescatter_options: Any = None
    ) -> None:
        """The sum of everyone's part `rank` of `tensor_list`. Costs an all-reduce of the list."""
        _only_sums(reducescatter_options)
        parts = [_as_tensor([part]) for part in tensor_list[0]]
        whole = torch.cat([part.reshape(-1) for part in parts])
        self._sum(whole)
        own = whole.split([part.numel() for part in parts])[self.rank]
        target = _as_tensor(tensor)
        target.copy_(own.view(target.shape))

    def allgather(
        self, tensor_list: list[list[Any]], tensor: list[Any], allgather_options: Any = None
    ) -> None:
        """Everyone's tensor, in rank order."""
        own = _as_tensor(tensor)
        found = self._reducer(own.device).all_gather(own)
        for target, value in zip(tensor_list[0], found, strict=True):
            _as_tensor([target]).copy_(value)

    def broadcast(self, tensor: list[Any], broadcast_options: Any = None) -> None:
        """Everyone ends with the tensor of `root_rank`."""
        root = 0 if broadcast_options is None else broadcast_options.root_rank
        own = _as_tensor(tensor)
        self._reducer(own.device).broadcast(own, root)

    def barrier(self, barrier_options: Any = None) -> None:
        """Return when all workers have called it."""
        self._reducer(torch.device("cpu")).barrier()

    def send(self, tensor: list[Any], send_options: Any) -> None:
        """Refused.

        Raises:
            UserError: Always.
        """
        raise UserError("backend TORUS has no send: use backend GLOO for messages between two.")

    def recv(self, tensor: list[Any], recv_options: Any) -> None:
        """Refused.

        Raises:
            UserError: Always.
        """
        raise UserError("backend TORUS has no recv: use backend GLOO for messages between two.")

    def _sum(self, tensor: torch.Tensor) -> None:
        reducer = self._reducer(tensor.device)
        if not tensor.is_floating_point():
            reducer.all_reduce(tensor)
            return
        flat = tensor.contiguous().view(-1)
        reducer.start(flat).wait()
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.view(tensor.shape))

    def _reducer(self, device: torch.device) -> Reducer:
        if device.type not in self._reducers:
            self._reducers[device.type] = Reducer(
                self.config, self._memberships[device.type], device
            )
        return self._reducers[device.type]

    def _meet(self) -> TCPStore:
        """A store that worker 0 serves and the others find through Ray's key-value store."""
        limit = timedelta(seconds=self.config.timeout_seconds)
        if self.rank == 0:
            host = ray.util.get_node_ip_address()
            store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=limit)
            address = f"{host} {store.port}"
            internal_kv._internal_kv_put(self._address_key, address, overwrite=True)
            return store
        deadline = time.monotonic() + self.config.timeout_seconds
        while time.monotonic() < deadline:
            found = internal_kv._internal_kv_get(self._address_key)
            if found is not None:
                host, port = found.decode().split()
                try:
                    attempt = timedelta(seconds=_ATTEMPT_SECONDS)
                    store = TCPStore(host, int(port), is_master=False, timeout=attempt)
                except RuntimeError:
                    continue  # left by a group that was never destroyed; worker 0 will replace it
                store.set_timeout(limit)
                return store
            time.sleep(0.05)
        raise RunFailedError(
            f"collective group {self.group_name}: worker {self.rank} has waited "
            f"{self.config.timeout_seconds:g} s for worker 0, which has not made the group."
        )

    def _nodes(self) -> tuple[str, ...]:
        self._store.set(f"node/{self.rank}", ray.get_runtime_context().get_node_id())
        keys = [f"node/{rank}" for rank in range(self.world_size)]
        try:
            return tuple(self._store.get(key).decode() for key in keys)
        except RuntimeError:
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            raise RunFailedError(
                f"collective group {self.group_name}: workers {missing} have not joined within "
                f"{self.config.timeout_seconds:g} s."
            ) from None


def _as_tensor(values: Sequence[Any]) -> torch.Tensor:
    """The one tensor of a list; a numpy array as a tensor that shares its memory."""
    (value,) = values
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def _only_sums(options: Any) -> None:
    op = ReduceOp.SUM if options is None else options.reduceOp
    if op is not ReduceOp.SUM:
        raise UserError(f"op = {op.name}: backend TORUS only sums. Use SUM, or backend GLOO.")
