"""Mixes this worker's micro-batches, and remembers the one before where that is mixed in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from adaptive_platform.collectives import Reducer
from adaptive_platform.data import MicroBatch
from adaptive_platform.data.mixing import (
    ErasingConfig,
    MixupConfig,
    class_shares,
    erased,
    mixed,
    mixing_weights,
)
from adaptive_platform.errors import UserError

__all__ = ["EveryMixing", "Mixing"]


class Mixing:
    """Mixup, then erasing, on the device.

    Args:
        mixup: None for none.
        erasing: None for none.
        classes: Number of classes; 0 where the data does not tell.
        seed: Of the run.

    Raises:
        UserError: Mixup of data whose classes are not known.
    """

    def __init__(
        self, mixup: MixupConfig | None, erasing: ErasingConfig | None, classes: int, seed: int
    ) -> None:
        if mixup is not None and not classes:
            raise UserError(
                "mixup: targets become shares of classes, and the data does not name its classes. "
                "Give them (`classes=...` for your own data), or leave mixup out."
            )
        self._mixup = mixup
        self._erasing = erasing
        self._classes = classes
        self._seed = seed
        self._before: tuple[Tensor, Tensor] | None = None
        """The last mixed micro-batch of a committed step: inputs and targets."""
        self._newest: tuple[Tensor, Tensor] | None = None

    def begin(self) -> None:
        """Start a step, or start it anew."""
        self._newest = self._before

    def __call__(self, batch: MicroBatch, epoch: int) -> MicroBatch:
        """The micro-batch to train on; the given one is not changed.

        Raises:
            UserError: Erasing of what are no images.
        """
        if self._mixup is None and self._erasing is None:
            return batch
        inputs, targets, ids = batch.inputs, batch.targets, batch.ids.numpy().astype(np.int64)
        if self._mixup is not None:
            targets = class_shares(targets, self._classes)
            weights = mixing_weights(self._seed, epoch, ids, self._mixup.alpha)
            if self._mixup.running:
                others = self._newest or (inputs[:0], targets[:0])
            else:
                others = inputs.flip(0), targets.flip(0)
            inputs = mixed(inputs, others[0], weights)
            targets = mixed(targets, others[1], weights)
            if self._mixup.running:
                self._newest = inputs, targets
        if self._erasing is not None:
            if inputs.dim() != 4:
                raise UserError(
                    f"erasing: made for images [N, C, H, W]; the data has shape "
                    f"{tuple(inputs.shape)}. Leave it out."
                )
            inputs = erased(inputs, self._erasing, self._seed, epoch, ids)
        return replace(batch, inputs=inputs, targets=targets)

    def commit(self) -> None:
        """The step counts: what was mixed in it goes on."""
        self._before = self._newest

    @property
    def remembers(self) -> bool:
        """A checkpoint has to hold this worker's last micro-batch."""
        return self._mixup is not None and self._mixup.running

    def state_dict(self) -> dict[str, Tensor]:
        """The last mixed micro-batch; empty where there is none."""
        if self._before is None:
            return {}
        return {"inputs": self._before[0].cpu(), "targets": self._before[1].cpu()}

    def load_state_dict(self, state: Mapping[str, Tensor], device: torch.device) -> None:
        """Continue from `state_dict`."""
        self._before = None
        if state and self.remembers:
            self._before = state["inputs"].to(device), state["targets"].to(device)


class EveryMixing:
    """All workers' `Mixing`, as a checkpoint holds them; implements `OwnPart`.

    Args:
        mixing: This worker's.
        reducer: The workers.
    """

    def __init__(self, mixing: Mixing, reducer: Reducer) -> None:
        self._mixing = mixing
        self._reducer = reducer

    def state_dict(self) -> list[dict[str, Tensor]] | None:
        """Every worker's, in rank order; None where nothing of them is needed."""
        if not self._mixing.remembers:
            return None
        return self._reducer.all_gather_object(self._mixing.state_dict())

    def load(self, saved: list[dict[str, Tensor]] | None) -> list[str]:
        """With as many workers as before each goes on from its own.

        Else mixing starts from the plain samples, as at the beginning of a run.
        """
        if saved is None or not self._mixing.remembers:
            return []
        if len(saved) != self._reducer.world_size:
            return [
                f"mixup.running: the mixed batches of {len(saved)} workers are left out, as the "
                "number of workers changed."
            ]
        self._mixing.load_state_dict(saved[self._reducer.rank], self._reducer.device)
        return []
