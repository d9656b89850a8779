"""Base of our own optimizers: walks gradients in multi-tensor batches, reads them only."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from adaptive_platform.errors import UserError

__all__ = ["MultiTensorOptimizer", "TensorBatch", "add_scaled", "norms", "trust_ratios"]


@dataclass(frozen=True, slots=True)
class TensorBatch:
    """Parameters of one device and type that are updated together, with gradients and state."""

    params: list[Tensor]
    grads: list[Tensor]
    """Read only: whoever measures gradients after the step sees what came in."""
    state: dict[str, list[Tensor]]
    """Buffers by state key, each shaped like its parameter."""


class MultiTensorOptimizer(Optimizer):
    """Keeps zero-initialised buffers per parameter and hands them to `update` in batches.

    A parameter without gradient is left alone, buffers included. On an accelerator a batch holds
    everything of one device and type, so that a step is a few launches; on a CPU it holds one
    tensor, which stays in the cache from the first operation to the last.
    """

    buffer_keys: ClassVar[tuple[str, ...]] = ()
    """State that starts at zero and is shaped like its parameter."""
    number_keys: ClassVar[tuple[str, ...]] = ()
    """State that is a plain number per parameter."""

    @property
    def state_keys(self) -> tuple[str, ...]:
        """Everything a checkpoint holds per parameter."""
        return (*self.buffer_keys, *self.number_keys)

    @abstractmethod
    def update(self, group: dict[str, Any], batch: TensorBatch) -> None:
        """Write the step into `batch.params` and `batch.state`; leave `batch.grads` alone."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step with the gradients now in `.grad`.

        Args:
            closure: Re-evaluates the model and returns the loss, as in `torch.optim`.

        Raises:
            UserError: A gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for batch in self._batches(group):
                self.update(group, batch)
        return loss

    def _batches(self, group: dict[str, Any]) -> Iterator[TensorBatch]:
        together: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for index, param in enumerate(group["params"]):
            if param.grad is None:
                continue
            if param.grad.is_sparse:
                name = group.get("param_names", {index: f"parameter {index}"})[index]
                raise UserError(
                    f"model: {name} has a sparse gradient, which {type(self).__name__} can't use. "
                    "Build the embedding with sparse=False."
                )
            if _is_host(param.device):
                yield self._batch([param])
            else:
                together.setdefault((param.device, param.dtype), []).append(param)
        for params in together.values():
            yield self._batch(params)

    def _batch(self, params: list[Tensor]) -> TensorBatch:
        buffers: dict[str, list[Tensor]] = {key: [] for key in self.buffer_keys}
        grads = []
        for param in params:
            assert param.grad is not None
            grads.append(param.grad)
            state = self.state[param]
            for key, tensors in buffers.items():
                if key not in state:
                    state[key] = torch.zeros_like(param, memory_format=torch.preserve_format)
                tensors.append(state[key])
        return TensorBatch(params, grads, buffers)


def norms(tensors: list[Tensor]) -> Tensor:
    """L2 norm of each whole tensor, shape `[len(tensors)]`, in at least float32."""
    low = tensors[0].dtype in (torch.float16, torch.bfloat16)
    return torch.stack(torch._foreach_norm(tensors, 2, torch.float32 if low else None))


def trust_ratios(above: Tensor, below: Tensor, allowed: Tensor) -> Tensor:
    """`above / below` where `allowed`, else 1, without asking the device for the answer."""
    return torch.where(allowed, above / below, 1.0)


def add_scaled(targets: list[Tensor], terms: list[Tensor], scales: Tensor) -> None:
    """`targets[i] += scales[i] * terms[i]`, with `scales` of shape `[len(targets)]`."""
    if _is_host(scales.device):  # nothing to wait for, and a plain number is twice as fast
        for target, term, scale in zip(targets, terms, scales.tolist(), strict=True):
            target.add_(term, alpha=scale)
    else:
        torch._foreach_addcmul_(targets, terms, [s.to(targets[0].dtype) for s in scales.unbind()])


def _is_host(device: torch.device) -> bool:
    return device.type == "cpu"
