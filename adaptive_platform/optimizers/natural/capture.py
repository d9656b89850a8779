"""Hooks that hand over a layer's input and output gradient, with all loss scaling undone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from adaptive_platform.optimizers.natural.coverage import Layer

__all__ = ["Capture", "Receiver"]

Receiver = Callable[[int, nn.Module, Tensor, Tensor, float], None]
"""Takes index of the layer, module, input, the gradient in its output, and the factor that makes
it the gradient of each sample's own loss. The factor is apart, since scaling a small product of
gradients costs less."""


class Capture:
    """Listens to layers between `begin` and `end`, once per backward through each use of a layer.

    The loss that is back-propagated must be `sum of losses * loss_scale / global_batch`, so that
    the gradient in an output, times `global_batch / loss_scale`, is that of each sample's own
    loss. The layer's input is kept alive until backward, where autograd mostly needs it anyway.

    Args:
        layers: What to listen to.
        receive: Called within backward, without autograd and autocast.
        wanted: Tells by index which layers to listen to in this step.
    """

    def __init__(
        self, layers: Sequence[Layer], receive: Receiver, wanted: Callable[[int], bool]
    ) -> None:
        self._receive = receive
        self._wanted = wanted
        self._active = False
        self._scale = 1.0
        self._handles = [
            module.register_forward_hook(partial(self._after_forward, index), with_kwargs=True)
            for index, layer in enumerate(layers)
            for module in layer.modules
        ]

    def begin(self, global_batch: int, loss_scale: float) -> None:
        """Listen from now on."""
        self._scale = global_batch / loss_scale
        self._active = True

    def end(self) -> None:
        """Stop listening; a backward that still comes changes nothing."""
        self._active = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not listen to what is run inside, such as a backward pass for the inputs alone."""
        was, self._active = self._active, False
        try:
            yield
        finally:
            self._active = was

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _after_forward(
        self,
        index: int,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Tensor,
    ) -> None:
        if not (self._active and output.requires_grad and self._wanted(index)):
            return
        inputs = (args[0] if args else kwargs["input"]).detach()
        output.register_hook(partial(self._on_gradient, index, module, inputs))

    def _on_gradient(self, index: int, module: nn.Module, inputs: Tensor, gradient: Tensor) -> None:
        if not self._active:
            return
        with torch.no_grad(), torch.autocast(gradient.device.type, enabled=False):
            self._receive(index, module, inputs, gradient.detach(), self._scale)
