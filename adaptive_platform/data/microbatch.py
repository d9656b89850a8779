"""Samples of one forward and backward pass, from the reader to the device."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from adaptive_platform.data.normalization import Normalization

__all__ = ["MicroBatch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Samples of one forward and backward pass."""

    inputs: Tensor
    """[N, ...]; images are uint8 [N, 1 or 3, H, W] until `on`, then float32 [N, 3, H, W]."""
    targets: Tensor
    """[N, ...]; class numbers are int64 [N]."""
    ids: Tensor
    """Indices in the data set, int64 [N]."""
    normalization: Normalization | None = None
    """What is still to be done to the inputs; None where they are as the model takes them."""

    def __len__(self) -> int:
        return len(self.ids)

    def on(
        self,
        device: torch.device | str,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> MicroBatch:
        """The micro-batch as the model takes it: on its device, images normalized there.

        Args:
            device: Where the model is.
            memory_format: Layout of 4-D inputs.
        """
        inputs = self.inputs.to(device, non_blocking=True)
        if self.normalization is not None:
            inputs = self.normalization(inputs, memory_format)
        elif inputs.dim() == 4:
            inputs = inputs.contiguous(memory_format=memory_format)
        targets = self.targets.to(device, non_blocking=True)
        return replace(self, inputs=inputs, targets=targets, normalization=None)
