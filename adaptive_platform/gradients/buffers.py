"""What forward moves in a model besides gradients: kept for a dropped step, alike on all workers.

Batch norm's running averages ride at the end of the last bucket, so every worker has the average of
all workers' after each step: evaluation and checkpoints need no message of their own, and a resumed
run goes on from exactly what the run had.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["SharedBuffers"]


class SharedBuffers:
    """The buffers of a module, found by owner and name: a model may put a new tensor in place.

    Args:
        model: The module; which buffers it has, and their shapes, must not change.
        shared: False for one worker alone, who has nothing to average.
    """

    def __init__(self, model: nn.Module, *, shared: bool) -> None:
        self._owners = [
            (module, name)
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False)
            if buffer is not None
        ]
        # Only these: averaging would wear down constants, a rounding error a step.
        self._averaged = [
            (module, name)
            for module, name in self._owners
            if shared and isinstance(module, _BatchNorm) and name in ("running_mean", "running_var")
        ]
        self._kept: list[Tensor] = []

    @property
    def num_averaged(self) -> int:
        """Numbers that ride along in each step."""
        return sum(_get(module, name).numel() for module, name in self._averaged)

    def keep(self) -> None:
        """Remember the values, before a forward pass that may not count."""
        self._kept = [_get(module, name).detach().clone() for module, name in self._owners]

    @torch.no_grad()
    def put_back(self) -> None:
        """Undo everything since `keep`."""
        for (module, name), kept in zip(self._owners, self._kept, strict=True):
            _set(module, name, kept)
        self._kept = []

    def write_to(self, slots: Tensor, weight: float) -> None:
        """Write `weight` times the averaged buffers.

        Args:
            slots: Float32, `num_averaged` long; summed over the workers afterwards.
            weight: Samples of this worker in the step; 0 where it took no part.
        """
        if self._averaged and weight:
            flat = [_get(m, name).detach().reshape(-1).float() for m, name in self._averaged]
            slots.copy_(torch.cat(flat) * weight)

    @torch.no_grad()
    def read_from(self, slots: Tensor, weight: float) -> None:
        """Take the average over all workers' samples.

        Args:
            slots: What the reduction left.
            weight: Samples of all workers.
        """
        if not self._averaged:
            return
        start = 0
        for module, name in self._averaged:
            buffer = _get(module, name)
            mean = slots[start : start + buffer.numel()] / weight
            _set(module, name, mean.view(buffer.shape))
            start += buffer.numel()


def _set(module: nn.Module, name: str, value: Tensor) -> None:
    """In place where the buffer has memory of its own for each element, else a new tensor."""
    buffer = _get(module, name)
    shares = any(step == 0 and n > 1 for step, n in zip(buffer.stride(), buffer.shape, strict=True))
    if shares or buffer.shape != value.shape:
        module._buffers[name] = value.to(buffer.dtype)
    else:
        buffer.copy_(value)


def _get(module: nn.Module, name: str) -> Tensor:
    buffer = module._buffers[name]
    assert buffer is not None
    return buffer
