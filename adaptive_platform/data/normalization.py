"""Images as bytes become normalized floats once per micro-batch, on the device that trains."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

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
        if memory_format == torch.channels_last:
            # Whole rows at a time: broadcasting over an innermost axis of 3 is four times slower.
            shift, factor = _constants(self.mean, self.std, pixels.device, pixels.shape[3])
            result.permute(0, 2, 3, 1).flatten(2).sub_(shift).mul_(factor)
        else:
            shift, factor = _constants(self.mean, self.std, pixels.device, 1)
            result.sub_(shift.view(3, 1, 1)).mul_(factor.view(3, 1, 1))
        return result


@lru_cache(maxsize=16)
def _constants(
    mean: Channels, std: Channels, device: torch.device, repeats: int
) -> tuple[Tensor, Tensor]:
    """What to subtract and to multiply by; kept, as bringing them over would stall the device."""
    shift, scale = 255.0 * torch.tensor(mean), 255.0 * torch.tensor(std)
    return shift.repeat(repeats).to(device), scale.reciprocal().repeat(repeats).to(device)
