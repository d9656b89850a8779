"""The loss's top Hessian eigenvalue on a fixed probe batch, shared out over the workers."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from adaptive_platform.collectives import Reducer
from adaptive_platform.data import DataConfig, MicroBatch, Samples, evaluation_batches
from adaptive_platform.errors import UserError
from adaptive_platform.gradients.loss import SampleLoss
from adaptive_platform.models import average_normalization, in_eval_mode
from adaptive_platform.statistics.hessian import (
    VectorMap,
    hessian_vector_product,
    power_iteration,
)
from adaptive_platform.training.probe import chosen_samples, read_plainly

__all__ = ["PROBE_SAMPLES", "Curvature"]

PROBE_SAMPLES = 128
"""Size of the probe batch, as published for ABS (Yao et al. 2018, arXiv 1810.01021)."""


class Curvature:
    """Measures the same un-augmented training samples each time, in eval mode and float32.

    Args:
        model: Module on its device.
        samples: The training set, of which the probe batch is drawn once by the seed.
        config: How samples are read.
        loss: Losses per sample.
        reducer: Adds up the workers' shares.
        seed: Of the run; chooses the probe batch and the start of the iteration.
        memory_format: Layout of 4-D inputs.
    """

    def __init__(
        self,
        model: nn.Module,
        samples: Samples,
        config: DataConfig,
        loss: SampleLoss,
        reducer: Reducer,
        *,
        seed: int,
        memory_format: torch.memory_format,
    ) -> None:
        self._model = model
        self._loss = loss
        self._reducer = reducer
        self._seed = seed
        self._memory_format = memory_format
        self._probe = chosen_samples(samples, PROBE_SAMPLES, seed)
        self._config = read_plainly(config)
        self._parameters = [p for p in model.parameters() if p.requires_grad]

    def top_eigenvalue(self, largest: int | None = None) -> float:
        """By power iteration; all workers take part and get the same number.

        Args:
            largest: Most samples of a pass; None for the whole share at once, which is quicker.

        Raises:
            UserError: The model can't be differentiated twice.
        """
        average_normalization(self._model, self._reducer.all_reduce, weight=1.0)
        device = self._parameters[0].device
        share = self._share(device, min(largest or PROBE_SAMPLES, PROBE_SAMPLES))
        count = torch.tensor([float(sum(map(len, share)))], device=device)
        self._reducer.all_reduce(count)
        total = max(float(count), 1.0)

        def loss(part: MicroBatch) -> Tensor:
            return self._loss(self._model(part.inputs), part.targets).sum() / total

        def by_parts(vector: Tensor) -> Tensor:
            """With the graph of a single part at a time, which is then made for each product."""
            image = torch.zeros_like(vector)
            for part in share:
                image += hessian_vector_product(partial(loss, part), self._parameters)(vector)
            return image

        numbers = sum(p.numel() for p in self._parameters)
        generator = torch.Generator().manual_seed(self._seed)
        start = torch.randn(numbers, generator=generator).to(device)
        # Of attention's kernels only this one can be differentiated twice.
        with in_eval_mode(self._model), sdpa_kernel(SDPBackend.MATH):
            try:
                product: VectorMap = by_parts
                if len(share) == 1:
                    product = hessian_vector_product(partial(loss, share[0]), self._parameters)
                # Each worker's product is a part of the mean over the probe: the sum is the whole.
                found = power_iteration(product, start, all_reduce=self._reducer.all_reduce)
            except (RuntimeError, NotImplementedError) as error:
                if "derivative" not in str(error):
                    raise
                raise UserError(
                    "batch.kind: it needs the Hessian, but the model can't be differentiated twice "
                    f"({error}). Use layers that can, or another controller such as noise_scale."
                ) from error
        return found.value

    def _share(self, device: torch.device, largest: int) -> list[MicroBatch]:
        reducer = self._reducer
        batches = evaluation_batches(
            self._probe, self._config, reducer.rank, reducer.world_size, largest
        )
        return [batch.on(device, self._memory_format) for batch in batches]
