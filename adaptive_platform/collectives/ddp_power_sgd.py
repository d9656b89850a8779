"""PowerSGD in torch's DistributedDataParallel, through PyTorch's own hook, with a state to save.

```python
state = PowerSgdConfig(rank=2).attach(model)
torch.save({"power_sgd": saved(state)}, f"worker-{rank}.pt")
```

Gradients go as low-rank factors and what they miss is added to the next step's (Vogels et al. 2019,
arXiv 1905.13727). That is each worker's own: resume with as many workers, each from its own file.
The hook sums with torch's process group, so our plans and failure handling have no part in it, and
our training loop does not offer it: its gradients are exact sums, which noise is measured from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from pydantic import Field
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
    PowerSGDState,
    powerSGD_hook,
)
from torch.nn.parallel import DistributedDataParallel

from adaptive_platform.errors import CheckpointError
from adaptive_platform.settings import Settings

__all__ = ["PowerSgdConfig", "load", "saved"]

_BY_BUCKET = {"errors": "error_dict", "left": "p_memory_dict", "right": "q_memory_dict"}
"""What is saved of each bucket, and what torch calls it."""


class PowerSgdConfig(Settings):
    """How gradients are compressed. Torch's other settings stay as they are."""

    rank: int = Field(1, ge=1)
    """Rank of the factors of each gradient, taken as a matrix; more is closer and longer."""
    start_after: int = Field(1000, ge=2)
    """Steps with plain averages at first, in which the model moves fast and DDP settles its
    buckets."""
    min_compression: float = Field(2.0, gt=0)
    """Gradients that would not get shorter by this factor travel as they are, as biases do."""

    def attach(
        self, model: DistributedDataParallel, process_group: ProcessGroup | None = None
    ) -> PowerSGDState:
        """Register the hook on a model that has none yet.

        Args:
            model: Before its first backward pass.
            process_group: That of the model; torch's default group where None.

        Returns:
            The hook's state, for `saved` and `load`.
        """
        state = PowerSGDState(
            process_group,
            matrix_approximation_rank=self.rank,
            start_powerSGD_iter=self.start_after,
            min_compression_rate=self.min_compression,
        )
        model.register_comm_hook(state, powerSGD_hook)
        return state


def saved(state: PowerSGDState) -> dict[str, Any]:
    """This worker's state as plain values and tensors, which `weights_only=True` loads."""
    generator = state.rng.get_state(legacy=False)["state"]
    content: dict[str, Any] = {
        "step": state.iter,
        "random_keys": torch.from_numpy(generator["key"].astype("int64")),
        "random_position": int(generator["pos"]),
    }
    for name, attribute in _BY_BUCKET.items():
        by_bucket = getattr(state, attribute)
        content[name] = {index: value.detach().cpu() for index, value in by_bucket.items()}
    return content


def load(state: PowerSGDState, content: Mapping[str, Any], device: torch.device) -> None:
    """Go on from `saved`, after `attach` and before the first backward pass.

    DDP sorts its buckets anew after its first step, so that one is a plain average again; then the
    errors and factors are those that were saved.

    Raises:
        CheckpointError: It was was saved in the middle of a step.
    """
    lengths = {name: sorted(content[name]) for name in _BY_BUCKET}
    if len({tuple(found) for found in lengths.values()}) > 1:
        raise CheckpointError(
            f"power_sgd: the state is of different buckets ({lengths}). Save it between two steps."
        )
    generator = state.rng.get_state(legacy=False)
    generator["state"]["key"] = content["random_keys"].numpy().astype("uint32")
    generator["state"]["pos"] = content["random_position"]
    state.rng.set_state(generator)
    for name, attribute in _BY_BUCKET.items():
        by_bucket = {index: value.to(device) for index, value in content[name].items()}
        setattr(state, attribute, by_bucket)
    state.iter = min(content["step"], state.start_powerSGD_iter - 1)
