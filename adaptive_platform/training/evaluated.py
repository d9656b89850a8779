"""What evaluations score: the model, the average of its weights, or an ensemble of snapshots."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from adaptive_platform.optimizers.weight_averaging import WeightAveraging

__all__ = ["Ensemble", "Evaluated"]


class Ensemble(nn.Module):
    """The mean of the snapshots' probabilities, as their logarithm: class scores like any other.

    Args:
        model: Runs each snapshot's weights and buffers in turn.
        snapshots: Values of `model.state_dict()`.
    """

    def __init__(self, model: nn.Module, snapshots: list[dict[str, Tensor]]) -> None:
        super().__init__()
        self._model = model
        self._snapshots = snapshots

    def forward(self, inputs: Tensor) -> Tensor:
        """Log-probabilities `[b, classes]`."""
        members = [
            functional_call(self._model, snapshot, (inputs,)).float().log_softmax(dim=1)
            for snapshot in self._snapshots
        ]
        return torch.logsumexp(torch.stack(members), dim=0) - math.log(len(members))


class Evaluated:
    """Follows the training and says what to score. Equal on all workers.

    Args:
        model: What is trained.
        averaging: The average of its weights, where the recipe has one.
        cycle_ends: Where snapshots are taken, in the unit of the run's length; none without an
            ensemble (Codreanu et al. 2017, arXiv 1711.04291).
    """

    def __init__(
        self, model: nn.Module, averaging: WeightAveraging | None, cycle_ends: list[float]
    ) -> None:
        self._model = model
        self._averaging = averaging
        self._cycle_ends = cycle_ends
        self._snapshots: list[dict[str, Tensor]] = []
        self._taken_at = -1

    def visit(self, step: int, done: float) -> None:
        """Take the new weights of a committed step in; once per step, no worker is talked to.

        Args:
            step: Committed steps so far.
            done: Share of the run that lies behind; 1 at its end.
        """
        if self._averaging is not None:
            self._averaging.visit(self._model, step, done)

    def end_cycle(self, step: int, time: float, done: float, refresh: Callable[[], None]) -> None:
        """Take a snapshot where a cycle ended with the last step; an evaluation is due then.

        Args:
            step: Committed steps so far.
            time: Where schedules stand.
            done: As in `visit`.
            refresh: Gives the model the buffers that an evaluation would use; all workers take
                part, and nothing has changed where one of them is lost meanwhile.
        """
        over = [end for end in self._cycle_ends if time >= end * (1.0 - 1e-9)]
        ended = len(self._cycle_ends) if done >= 1.0 else len(over)
        if ended <= len(self._snapshots):
            return
        refresh()
        self._snapshots.append(
            {name: value.detach().clone() for name, value in self._model.state_dict().items()}
        )
        self._taken_at = step

    def took_snapshot(self, step: int) -> bool:
        """A cycle ended with that step, so that its evaluation scores the ensemble."""
        return self._taken_at == step

    def module(self, step: int) -> nn.Module:
        """What an evaluation after that many steps scores.

        The ensemble of all snapshots so far where the last was just taken; else the average of the
        weights once it exists; else the model itself.
        """
        if self.took_snapshot(step):
            return Ensemble(self._model, self._snapshots)
        averaged = self._averaging.model if self._averaging is not None else None
        return self._model if averaged is None else averaged

    def state_dict(self) -> dict[str, Any]:
        """Average and snapshots, as plain tensors."""
        return {
            "average": self._averaging.state_dict() if self._averaging is not None else None,
            "snapshots": self._snapshots,
            "taken_at": self._taken_at,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`; what today's recipe does not have is left out."""
        if self._averaging is not None and state["average"] is not None:
            self._averaging.load_state_dict(state["average"])
        if self._cycle_ends:
            device = next(self._model.parameters()).device
            self._snapshots = [
                {name: value.to(device) for name, value in snapshot.items()}
                for snapshot in state["snapshots"]
            ]
            self._taken_at = int(state["taken_at"])
