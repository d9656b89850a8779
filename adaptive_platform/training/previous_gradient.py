"""The gradient of the step before, for runs whose steps are a single micro-batch (Pollux)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from adaptive_platform.gradients.buckets import GradientBuckets
from adaptive_platform.optimizers import AdamPreconditioner
from adaptive_platform.statistics import DifferencedMoments

__all__ = ["PreviousGradient"]


class PreviousGradient:
    """Differences between consecutive mean gradients: noise that one micro-batch can't show.

    Holds one copy of the gradient, and only in runs that need it.
    """

    def __init__(self) -> None:
        self._gradients: dict[str, Tensor] = {}
        self._batch = 0

    @torch.no_grad()
    def difference(
        self,
        buckets: GradientBuckets,
        mean_factor: float,
        batch: int,
        preconditioner: AdamPreconditioner | None = None,
    ) -> DifferencedMoments | None:
        """Compare with the step before and keep this step's gradient. Synchronises.

        Args:
            buckets: Hold the summed gradient.
            mean_factor: Makes it a mean.
            batch: Samples that entered it.
            preconditioner: What both gradients are looked at through, as it is in this step.

        Returns:
            None at the first call.
        """
        named = dict(buckets.summed())
        now = torch._foreach_mul(list(named.values()), mean_factor)
        moments = None
        if self._gradients:
            before = [self._gradients[name].to(g.device) for name, g in named.items()]
            seen, seen_before = list(now), before
            if preconditioner is not None:
                seen = preconditioner.scaled(buckets.parameters_of_sums, now)
                seen_before = preconditioner.scaled(buckets.parameters_of_sums, before)
            differences = torch._foreach_sub(seen, seen_before)
            apart = torch._foreach_norm(differences, dtype=torch.float32)
            inner = [tensor.sum() for tensor in torch._foreach_mul(seen, seen_before)]
            values = torch.stack(
                [torch.stack(apart).square().sum(), torch.stack(inner).sum().float()]
            )
            difference, product = values.tolist()
            moments = DifferencedMoments(
                difference_sqnorm=difference,
                inner_product=product,
                global_batch=batch,
                previous_batch=self._batch,
                preconditioned=preconditioner is not None,
            )
        self._gradients = dict(zip(named, now, strict=True))
        self._batch = batch
        return moments

    def forget(self) -> None:
        """Let the copy go, once noise is measured within steps."""
        self._gradients = {}

    def state_dict(self) -> dict[str, Any]:
        """A number and tensors for a checkpoint."""
        return {
            "batch": self._batch,
            "gradients": {name: value.cpu() for name, value in self._gradients.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`, bit for bit."""
        self._batch = int(state["batch"])
        self._gradients = dict(state["gradients"])
