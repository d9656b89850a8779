"""The contract of a synchronisation strategy: when gradients are summed, when weights are mixed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from adaptive_platform.progress import Progress
from adaptive_platform.settings import Variant

__all__ = ["FlatWeights", "Peers", "SyncConfig", "SyncStrategy"]


def _alone(_: Tensor) -> object:
    return None


def _nobody(_: Tensor, to: Sequence[int], sources: Sequence[int]) -> list[Tensor]:
    del to, sources
    return []


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """What a strategy may ask of the other workers; the default is a worker alone.

    All workers make the same calls in the same order, and sums are the same bits on all of them.
    """

    rank: int = 0
    world_size: int = 1
    sum: Callable[[Tensor], object] = _alone
    """Replaces a 1-D float32 tensor by its sum over all workers."""
    sum_on_node: Callable[[Tensor], object] = _alone
    """Replaces a 1-D float32 tensor by its sum over the workers of this one's node."""
    exchange: Callable[[Tensor, Sequence[int], Sequence[int]], list[Tensor]] = _nobody
    """Sends a 1-D tensor to each of the ranks named first and returns those of the ranks named
    second, in their order. Each worker names itself in neither."""


class FlatWeights:
    """The trained parameters of one worker's copy as one flat float32 vector, and back.

    Args:
        parameters: As from `module.parameters()`; frozen ones are left out.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        unique = {id(p): p for p in parameters if p.requires_grad}
        self._parameters = list(unique.values())
        self._sizes = [p.numel() for p in self._parameters]

    def read(self, extra: int = 0) -> Tensor:
        """A copy of all weights, shape (n + extra,), the last `extra` of them zero."""
        device = self._parameters[0].device
        flat = torch.empty(sum(self._sizes) + extra, dtype=torch.float32, device=device)
        if extra:
            flat[-extra:].zero_()
        torch._foreach_copy_(self._pieces(flat), [p.detach() for p in self._parameters])
        return flat

    def write(self, flat: Tensor) -> None:
        """Overwrite all weights by the first n numbers of a vector."""
        with torch.no_grad():
            torch._foreach_copy_([p.detach() for p in self._parameters], self._pieces(flat))

    def _pieces(self, flat: Tensor) -> list[Tensor]:
        parts = flat[: sum(self._sizes)].split(self._sizes)
        return [part.view(p.shape) for part, p in zip(parts, self._parameters, strict=True)]


class SyncStrategy(ABC):
    """Keeps the copies together. The loop calls its hooks in committed steps only.

    Where `sums_gradients` is false, each worker steps with the mean gradient of its own samples.
    Progress, schedules, votes and records stay common: a few numbers are still summed every step.
    """

    def __init__(self, weights: FlatWeights, peers: Peers) -> None:
        self._weights = weights
        self._peers = peers

    @abstractmethod
    def sums_gradients(self, progress: Progress) -> bool:
        """True where the next step is an ordinary one; the same on all workers."""

    def before_step(self) -> None:  # noqa: B027
        """Called with the gradients at hand, before the optimizer moves the weights."""

    def after_step(self, samples: int) -> None:  # noqa: B027
        """Called after the optimizer's step.

        Args:
            samples: That this worker trained on in the step; 0 where it had none and kept still.
        """

    @property
    def copies_differ(self) -> bool:
        """True while workers may hold different weights or optimizer states."""
        return False

    def agreed(self) -> Tensor | None:
        """The weights to score and to save, alike on all workers; None where copies are equal.

        All workers take part. Nothing is changed.
        """
        return None

    def settle(self) -> None:
        """Give every worker the agreed weights, for good: called when the run is over."""
        agreed = self.agreed()
        if agreed is not None:
            self._weights.write(agreed)

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors, alike on all workers, for a checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Continue from `state_dict`."""

    def own_state(self) -> dict[str, float | int]:
        """Plain numbers of this worker alone."""
        return {}

    def load_own_state(self, state: Mapping[str, float | int]) -> None:  # noqa: B027
        """Continue from `own_state`, where the number of workers is the same."""

    def _mean(self, samples: int) -> Tensor:
        """Mean of the copies weighted by samples; by workers where none trained on any."""
        flat = self._weights.read(extra=1)
        flat[-1] = 1.0
        self._peers.sum(flat.mul_(samples))
        if float(flat[-1]) == 0.0:
            flat = self._weights.read(extra=1)
            flat[-1] = 1.0
            self._peers.sum(flat)
        return flat[:-1].div_(flat[-1])


class SyncConfig(Variant):
    """How the workers' copies of the model are kept together."""

    lets_copies_differ: ClassVar[bool] = True
    """False where gradients are summed in every step."""

    def build(self, weights: FlatWeights, peers: Peers, *, seed: int) -> SyncStrategy:
        """The strategy for one worker.

        Args:
            weights: Of this worker's copy, equal on all workers now.
            peers: The link to the others.
            seed: For strategies that draw.
        """
        raise TypeError(f"{type(self).__name__} can't be built: use one of its variants")
