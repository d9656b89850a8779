"""Our reductions inside torch's DistributedDataParallel, as a communication hook.

```python
state = DdpState(Reducer(TorusConfig(), membership))
model.register_comm_hook(state, average)
```

DDP fills the buckets, overlaps them with backward and honours `no_sync`, as always; only what
happens to a full bucket changes: the sum by our plan, divided by the number of workers.
"""

import torch
from torch._C._distributed_c10d import GradBucket

from adaptive_platform.collectives.ordered import OrderedThread, Pending
from adaptive_platform.collectives.reducer import Reducer

__all__ = ["DdpState", "average"]


class DdpState:
    """What the hook needs to know.

    Args:
        reducer: Does the sums; it stays the caller's to close.
        wire_dtype: Type of the numbers between workers, such as `torch.bfloat16`; left out, that
            of the gradients. The division comes first, so that sums do not overflow.
    """

    def __init__(self, reducer: Reducer, wire_dtype: torch.dtype | None = None) -> None:
        self._reducer = reducer
        self._wire_dtype = wire_dtype
        self._thread = OrderedThread(f"ddp-hook-{reducer.rank}")

    @property
    def reducer(self) -> Reducer:
        """Does the sums, and counts their seconds and bytes."""
        return self._reducer

    def replace(self, reducer: Reducer) -> None:
        """Go on with another group of workers, between two steps; divide by its size from now."""
        self._reducer = reducer

    def close(self) -> None:
        """End the thread that hands finished buckets back to DDP."""
        self._thread.close()

    def begin(self, bucket: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Start to average a bucket over the workers, in place.

        Returns:
            A future of the same tensor; a `CollectiveError` comes out of it where backward ends.
        """
        bucket.div_(self._reducer.world_size)
        pending = self._reducer.start(bucket, self._wire_dtype)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=[bucket.device] if bucket.is_cuda else None
        )
        self._thread.submit(lambda: _hand_back(pending, bucket, future))
        return future


# No `from __future__ import annotations` in this file: DDP reads the hook's annotations as types.


def average(state: DdpState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The hook: gradients averaged over the workers, as DDP does it without one."""
    return state.begin(bucket.buffer())


def _hand_back(
    pending: Pending, bucket: torch.Tensor, future: torch.futures.Future[torch.Tensor]
) -> None:
    try:
        pending.wait()
    except Exception as error:
        future.set_exception(error)  # type: ignore[arg-type]  # torch annotates it as a result
    else:
        future.set_result(bucket)
