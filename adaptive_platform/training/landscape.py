"""A finished run's training loss as a function of its weights, for studies of the minimum."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor, nn

from adaptive_platform.checkpoints.store import CheckpointStore, read_state
from adaptive_platform.data import DataConfig, MicroBatch, Samples, evaluation_batches
from adaptive_platform.errors import UserError
from adaptive_platform.gradients.loss import SampleLoss
from adaptive_platform.recipe import load_recipe
from adaptive_platform.report.run_data import read_run
from adaptive_platform.statistics.sharpness import Vector
from adaptive_platform.training.fitness import memory_format_of

__all__ = ["Landscape", "landscape_of"]

_BATCH = 256


class Landscape:
    """Mean loss over samples without augmentation, and its gradient, at any parameter vector.

    The model is in eval mode, so that the value of a sample does not depend on the others; batch
    norm keeps the averages it was trained to (Keskar et al. leave that open).

    Args:
        model: Its trainable parameters are overwritten by each call.
        samples: Read once and kept in memory.
        config: How they are read.
        loss: Losses per sample.
        limit: Most samples that are used, from the first one on; None for all.
    """

    def __init__(
        self,
        model: nn.Module,
        samples: Samples,
        config: DataConfig,
        loss: SampleLoss,
        *,
        limit: int | None = None,
    ) -> None:
        self._model = model.eval()
        self._loss = loss
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        device, layout = self._parameters[0].device, memory_format_of(model)
        self._batches: list[MicroBatch] = []
        wanted = len(samples) if limit is None else min(limit, len(samples))
        for batch in evaluation_batches(samples, config, 0, 1, min(_BATCH, wanted)):
            self._batches.append(batch.on(device, layout))
            if self.num_samples >= wanted:
                break

    @property
    def num_samples(self) -> int:
        """Samples that the loss is the mean of."""
        return sum(map(len, self._batches))

    def parameters(self) -> Vector:
        """The trainable parameters as they are, in one float64 vector of length n."""
        return _flat(self._parameters)

    def __call__(self, vector: Vector) -> tuple[float, Vector]:
        """Mean loss and its gradient at `vector`, of length n."""
        with torch.no_grad():
            for parameter, piece in zip(self._parameters, self._pieces(vector), strict=True):
                parameter.copy_(torch.from_numpy(piece).view_as(parameter))
        total = 0.0
        gradients = [torch.zeros_like(p, dtype=torch.float64) for p in self._parameters]
        for batch in self._batches:
            summed = self._loss(self._model(batch.inputs), batch.targets).sum()
            found = torch.autograd.grad(summed, self._parameters, allow_unused=True)
            total += float(summed.detach())
            for gradient, more in zip(gradients, found, strict=True):
                if more is not None:
                    gradient += more
        return total / self.num_samples, _flat(gradients) / self.num_samples

    def _pieces(self, vector: Vector) -> list[Vector]:
        ends = list(accumulate(p.numel() for p in self._parameters))
        return np.split(vector, ends[:-1])


def landscape_of(run_dir: str, *, step: int | None = None, limit: int | None = None) -> Landscape:
    """The training loss of a run around one of its checkpoints.

    Args:
        run_dir: A run directory whose recipe opens the data.
        step: Committed steps of the checkpoint; None for the newest.
        limit: Most training samples.

    Raises:
        UserError: No such checkpoint, it is damaged, or the data can't be opened.
    """
    run = read_run(run_dir)
    recipe = load_recipe(run.recipe)
    store = CheckpointStore(run_dir)
    chosen = [saved for saved in store.saved() if step in (None, saved.step)]
    if not chosen:
        wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise UserError(f"{run_dir}: it has {wanted}; a run saves one at its end.")
    state = read_state(store.read(chosen[-1]))
    source = recipe.data.open()
    model = recipe.model.build(len(source.classes), recipe.seed)
    model.load_state_dict(state["model"])
    loss = recipe.loss.build_evaluation()
    return Landscape(model, source.train, recipe.data, loss, limit=limit)


def _flat(tensors: Sequence[Tensor]) -> Vector:
    joined: Vector = torch.cat([t.detach().reshape(-1).double().cpu() for t in tensors]).numpy()
    return joined
