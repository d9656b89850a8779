"""Images as bytes become normalized floats once per micro-batch, on the device that trains."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from adaptive_platform.data.sources import Channels

__all__ = ["Normalization"]


@dataclass(frozen=True, slots=True)
class Normalization:
    """Scales pixels to [0, 1] and normalizes each channel; gray becomes three channels."""

    mean: Channels
    """Subtracted, pixels in [0, 1]."""
    std: Channels
    """Divides, pixels in [0, 1]."""

    def __call__(
        self, pixels: Tensor, memory_format: torch.memory_format = torch.contiguous_format
    ) -> Tensor:
        """Convert a batch on the device it lies on.

        Args:
            pixels: uint8, [N, 1 or 3, H, W].
            memory_format: Layout of the result.

        Returns:
            float32, [N, 3, H, W].
        """
        if pixels.shape[1] == 1:
            pixels = pixels.expand(-1, 3, -1, -1)
        # Laid out while it is bytes, and then changed in place: a batch of floats is the largest
        # thing here, and a fresh copy of it costs more than the arithmetic.
        result = pixels.contiguous(memory_format=memory_format).to(torch.float32)
        mean = torch.tensor(self.mean, device=pixels.device)
        std = torch.tensor(self.std, device=pixels.device)
        shift, factor = 255.0 * mean, 1.0 / (255.0 * std)
        if memory_format == torch.channels_last:
            # Whole rows at a time: broadcasting over an innermost axis of 3 is four times slower.
            width = pixels.shape[3]
            rows = result.permute(0, 2, 3, 1).flatten(2)
            rows.sub_(shift.repeat(width)).mul_(factor.repeat(width))
        else:
            result.sub_(shift.view(3, 1, 1)).mul_(factor.view(3, 1, 1))
        return result
