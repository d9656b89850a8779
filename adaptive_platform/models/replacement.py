"""Swaps a model's batch-norm layers for ones of another class, parameters and names kept."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["adopt_parameters", "replace_batch_norm"]

_TORCH_KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def replace_batch_norm(
    model: nn.Module,
    make: Callable[[_BatchNorm], _BatchNorm],
    also: tuple[type[_BatchNorm], ...] = (),
) -> int:
    """Replace every torch batch-norm layer inside `model`.

    Call it before an optimizer or hooks are made. A layer that has several names stays one layer.

    Args:
        model: Changed in place; itself not a batch-norm layer.
        make: Gives the new layer, with the old one's parameters and buffers.
        also: Further classes whose layers are replaced, such as those of an earlier call.

    Returns:
        How many layers were replaced.
    """
    made: dict[int, _BatchNorm] = {}
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, _BatchNorm) and type(child) in (*_TORCH_KINDS, *also):
                if id(child) not in made:
                    made[id(child)] = make(child)
                setattr(module, name, made[id(child)])
        # named_children leaves out a second name of the same child.
        for name, second in list(module._modules.items()):
            if second is not None and id(second) in made:
                setattr(module, name, made[id(second)])
    return len(made)


def adopt_parameters(new: _BatchNorm, old: _BatchNorm) -> None:
    """Give `new` the very parameters, buffers and mode of `old`."""
    new.weight, new.bias = old.weight, old.bias
    new.running_mean, new.running_var = old.running_mean, old.running_var
    new.num_batches_tracked = old.num_batches_tracked
    new.train(old.training)
