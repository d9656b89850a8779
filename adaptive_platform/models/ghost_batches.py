"""Batch normalization on parts of a fixed size, so that it does not see the batch move."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from adaptive_platform.models.group_batch_norm import update_running_averages
from adaptive_platform.models.replacement import adopt_parameters

__all__ = ["GhostBatchNorm", "ghost_sizes"]


def ghost_sizes(samples: int, size: int) -> list[int]:
    """Split a micro-batch into parts of about `size` samples, as equal as can be.

    No part is a single sample unless the micro-batch is one, and parts are at most half as large
    again as `size`.

    Args:
        samples: Of the micro-batch, >= 1.
        size: Wanted samples per part, >= 2.
    """
    parts = max(1, min(round(samples / size), samples // 2))
    return [samples * (i + 1) // parts - samples * i // parts for i in range(parts)]


class GhostBatchNorm(_BatchNorm):
    """Each part of the micro-batch is normalized by its own mean and variance.

    Running averages take the statistics of the whole micro-batch (mean, and variance around it),
    once per pass, so that they do not depend on the number of parts. After Hoffer et al. 2017
    (arXiv 1705.08741), whose averages move once per part.
    """

    def __init__(self, old: _BatchNorm, size: int) -> None:
        """Take the place of `old`.

        Args:
            old: Its parameters and buffers are taken over.
            size: Samples per part.
        """
        affine = old.affine
        super().__init__(old.num_features, old.eps, old.momentum, affine, old.track_running_stats)
        adopt_parameters(self, old)
        self._size = size

    def forward(self, input: Tensor) -> Tensor:
        """Map `[N, C, ...]` to the same shape."""
        if not self.training and self.running_mean is not None:
            return F.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
            )
        parts = input.split(ghost_sizes(input.shape[0], self._size))
        outputs = [
            F.batch_norm(part, None, None, self.weight, self.bias, training=True, eps=self.eps)
            for part in parts
        ]
        if self.training and self.running_mean is not None:
            with torch.no_grad():
                wide = input.to(torch.promote_types(input.dtype, torch.float32))
                dims = [dim for dim in range(input.dim()) if dim != 1]
                variance, mean = torch.var_mean(wide, dim=dims, correction=0)
                count = mean.new_tensor(input.numel() / input.shape[1])
            update_running_averages(self, mean, variance, count)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _check_input_dim(self, input: Tensor) -> None:
        """Any number of positions per sample."""
