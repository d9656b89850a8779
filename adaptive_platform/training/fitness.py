"""What the loop asks of a model before it trains it: its layout, and what can't be reduced."""

from __future__ import annotations

import torch
from torch import nn

from adaptive_platform.errors import UserError

__all__ = ["memory_format_of", "refuse_sparse"]


def memory_format_of(model: nn.Module) -> torch.memory_format:
    """channels_last when the model's convolutions are laid out so."""
    for parameter in model.parameters():
        if parameter.dim() == 4 and parameter.shape[1] > 1:
            last = parameter.is_contiguous(memory_format=torch.channels_last)
            return torch.channels_last if last else torch.contiguous_format
    return torch.contiguous_format


def refuse_sparse(model: nn.Module) -> None:
    """Refuse embeddings whose gradients are sparse.

    Raises:
        UserError: Names the layer and the fix.
    """
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise UserError(
                f"model: `{name}.weight` has sparse gradients, which can't be reduced together "
                "with the others. Build the embedding with sparse=False."
            )
