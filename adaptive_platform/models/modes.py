"""Training mode and evaluation mode of a model, with the parts that its owner froze kept frozen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["TrainingMode", "in_eval_mode"]


class TrainingMode:
    """Puts a model into training mode as its owner means it.

    A model that comes wholly in evaluation mode was loaded or scored before, so all of it trains.
    Where only some modules are in evaluation mode they are frozen on purpose (batch norm while
    fine-tuning, dropout), and stay so. They are known by name, so a layer that is replaced later
    stays frozen too.

    Args:
        model: As its owner gives it; not changed yet.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        modes = {name: module.training for name, module in model.named_modules()}
        self._frozen = {name for name, mode in modes.items() if not mode and any(modes.values())}

    def apply(self) -> None:
        """Training mode everywhere but in what is frozen."""
        self._model.train()
        for name, module in self._model.named_modules():
            if name in self._frozen:
                module.training = False


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """All of `model` is in evaluation mode meanwhile; then each module is as it was before."""
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
