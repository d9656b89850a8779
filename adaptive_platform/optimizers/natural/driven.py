"""What a training loop does for an optimizer that listens to forward and backward passes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from adaptive_platform.errors import UserError
from adaptive_platform.optimizers.natural.capture import Capture
from adaptive_platform.optimizers.natural.coverage import Coverage

__all__ = ["ListeningOptimizer"]


class ListeningOptimizer(Optimizer):
    """An optimizer that needs more than gradients, with momentum applied to steps.

    A step of the loop is `begin`, forward and backward passes, then either `step`, with the
    reduced gradients in `.grad` (`accept` before it where fewer samples than planned were
    trained), or `discard`, which leaves no trace. Every worker makes the same calls.

    The update is `v <- m v - lr (P + wd w); w <- w + v`, with P the preconditioned gradient, or the
    plain one where a parameter is not covered. Gradients are read and never written.
    """

    coverage: Coverage
    """Which parameters are preconditioned."""

    def __init__(self, params: Any, defaults: dict[str, Any], uncovered_lr_scale: float) -> None:
        super().__init__(params, defaults)
        self._uncovered_lr_scale = uncovered_lr_scale
        self._planned: int | None = None
        self._samples = 0
        self._steps = 0
        """Committed steps."""
        self._capture: Capture | None = None

    # --- the loop's calls -----------------------------------------------------------------------

    def begin(self, global_batch: int, loss_scale: float = 1.0) -> None:
        """Start a step.

        Args:
            global_batch: Samples that all workers are meant to train on; the losses that are
                back-propagated are sums over samples times `loss_scale / global_batch`.
            loss_scale: As for mixed precision; 1 without.
        """
        self.discard()
        self._planned = self._samples = global_batch
        self._prepare()
        if self._capture is not None:
            self._capture.begin(global_batch, loss_scale)

    def accept(self, samples: int) -> None:
        """Say before `step` how many samples all workers trained on, where some were left out."""
        self._samples = samples

    def discard(self) -> None:
        """Drop the step in hand: nothing of it enters factors, momentum or intervals."""
        self._planned = None
        if self._capture is not None:
            self._capture.end()
        self._forget()

    def paused(self) -> AbstractContextManager[None]:
        """Do not listen to passes inside, such as those that make adversarial images."""
        assert self._capture is not None
        return self._capture.paused()

    def close(self) -> None:
        """Remove the hooks from the model."""
        if self._capture is not None:
            self._capture.close()

    def describe(self) -> str:
        """Which layers are preconditioned and which parameters are not, in words."""
        return self.coverage.describe()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step with the reduced gradients now in `.grad`.

        Args:
            closure: Runs `begin` and the model, and returns the loss.

        Raises:
            UserError: `begin` was not called, so that nothing was listened to.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._planned is None:
            raise UserError(
                f"optimizer: {type(self).__name__}.step() without begin(). Call "
                "begin(global_batch, loss_scale) before the forward passes of each step."
            )
        if self._capture is not None:
            self._capture.end()
        directions = self._directions(self._samples)
        self._apply(directions)
        self._steps += 1
        self._planned = None
        return loss

    # --- for subclasses -------------------------------------------------------------------------

    @abstractmethod
    def _directions(self, samples: int) -> dict[nn.Parameter, torch.Tensor]:
        """Preconditioned gradients of a step on `samples` samples over all workers."""

    @abstractmethod
    def _forget(self) -> None:
        """Drop what the step in hand collected."""

    def _prepare(self) -> None:
        """Decide what the step that begins collects."""

    def _momentum(self, group: dict[str, Any]) -> float:
        return float(group["momentum"])

    def _apply(self, directions: Mapping[nn.Parameter, torch.Tensor]) -> None:
        for group in self.param_groups:
            momentum, decay = self._momentum(group), group["weight_decay"]
            for covered in (True, False):
                params = [
                    p
                    for p in group["params"]
                    if p.grad is not None and (p in directions) is covered
                ]
                if not params:
                    continue
                lr = float(group["lr"]) * (1.0 if covered else self._uncovered_lr_scale)
                steps = [directions[p].to(p.dtype) if covered else p.grad for p in params]
                buffers = [self._buffer(p) for p in params]
                if decay:
                    steps = list(torch._foreach_add(steps, params, alpha=decay))
                torch._foreach_mul_(buffers, momentum)
                torch._foreach_add_(buffers, steps, alpha=-lr)
                torch._foreach_add_(params, buffers)

    def _buffer(self, param: nn.Parameter) -> torch.Tensor:
        state = self.state[param]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(param)
        return state["momentum_buffer"]

    # --- state ----------------------------------------------------------------------------------

    state_keys = ("momentum_buffer",)
    """What is kept per parameter; the rest is in `natural_state`."""

    def natural_state(self) -> dict[str, Any]:
        """All state besides that per parameter, as plain values. All workers call it together."""
        return {"steps": self._steps}

    def load_natural_state(self, saved: Mapping[str, Any]) -> None:
        """Continue from `natural_state`, with any number of workers.

        Raises:
            CheckpointError: Made for other layers.
        """
        self.discard()
        self._steps = int(saved["steps"])

    def state_dict(self) -> dict[str, Any]:
        """Torch's, and `natural_state` under `natural`. All workers call it together."""
        return {**super().state_dict(), "natural": self.natural_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        super().load_state_dict(
            {key: value for key, value in state_dict.items() if key != "natural"}
        )
        self.load_natural_state(state_dict["natural"])
