"""Which samples batch normalization normalizes together, and what it uses at evaluation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import Field, field_validator
from pydantic_core.core_schema import ValidationInfo
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from adaptive_platform.errors import UserError
from adaptive_platform.models.evaluation_statistics import use_last_batch
from adaptive_platform.models.ghost_batches import GhostBatchNorm
from adaptive_platform.models.group_batch_norm import GroupBatchNorm, normalization_group
from adaptive_platform.models.replacement import replace_batch_norm
from adaptive_platform.settings import Variant

__all__ = [
    "AnyNormalization",
    "GhostNorm",
    "GroupLink",
    "GroupNorm",
    "LocalNorm",
    "NormalizationPolicy",
]

GroupLink = Callable[[tuple[int, ...]], Callable[[Tensor], object]]
"""Takes the ranks of a group and gives the function that sums a tensor over them in place."""


class NormalizationPolicy(Variant, ABC):
    """How batch normalization takes its statistics; the plain `local` suits models without it."""

    together: ClassVar[bool] = False
    """Workers talk to each other within a pass, so all must make equally many."""

    evaluation: Literal["running_average", "last_batch", "recomputed"] = "running_average"
    """`running_average`: torch's. `last_batch`: those of each worker's last micro-batch, averaged
    over workers. `recomputed`: those of training samples passed once more before an evaluation."""
    recompute_samples: int | None = Field(default=None, ge=2)
    """Training samples of a recomputation, over all workers, the same ones each time; null for
    1,024. Only with `recomputed`."""

    @field_validator("recompute_samples")
    @classmethod
    def _recomputes(cls, samples: int | None, info: ValidationInfo) -> int | None:
        if samples is not None and info.data.get("evaluation") != "recomputed":
            raise ValueError("needs evaluation = recomputed; leave it out")
        return samples

    def apply(self, model: nn.Module, rank: int, world_size: int, link: GroupLink) -> int:
        """Give the model this policy, before optimizer and hooks are made.

        Args:
            model: Changed in place; names of parameters and buffers stay.
            rank: This worker.
            world_size: Workers; every one applies the policy.
            link: Makes the reduction within a group; called at most once.

        Returns:
            How many layers were replaced.

        Raises:
            UserError: The model has no batch normalization that it could change.
        """
        has_any = any(isinstance(module, _BatchNorm) for module in model.modules())
        if self != LocalNorm() and not has_any:
            raise UserError(
                f"model.normalization.kind = {self.kind}: the model has no batch normalization. "
                "Leave it out."
            )
        replaced = self._replace(model, rank, world_size, link)
        if self.evaluation == "last_batch":
            use_last_batch(model)
        return replaced

    def smallest_share(self, world_size: int) -> int:
        """Samples that each worker needs in a pass, where workers pass together."""
        return 2

    @abstractmethod
    def _replace(self, model: nn.Module, rank: int, world_size: int, link: GroupLink) -> int:
        """Swap the layers; how many were."""


class LocalNorm(NormalizationPolicy):
    """Each worker normalizes its own micro-batch."""

    kind: Literal["local"] = "local"

    def _replace(self, model: nn.Module, rank: int, world_size: int, link: GroupLink) -> int:
        return 0


class GroupNorm(NormalizationPolicy):
    """Several workers normalize together (Ying et al. 2018, arXiv 1811.06992).

    Every worker makes equally many passes of at least one sample (two, where a group has a single
    member) in each step, so at the end of an epoch fewer samples than that join the step before. A
    step in which some worker can't read enough samples is left out by all. Memory that runs out in
    such a pass stops it on one worker only, and the others notice by their time limit: choose
    `microbatch` with room to spare.
    """

    kind: Literal["group"] = "group"
    together: ClassVar[bool] = True
    workers: int = Field(default=2, ge=2)
    """Most workers per group; groups are of consecutive ranks and as equal as can be."""

    def smallest_share(self, world_size: int) -> int:
        """One sample, as the others have more; two for a worker that is a group of its own."""
        groups = {normalization_group(r, world_size, self.workers) for r in range(world_size)}
        return 2 if min(map(len, groups)) == 1 else 1

    def _replace(self, model: nn.Module, rank: int, world_size: int, link: GroupLink) -> int:
        members = normalization_group(rank, world_size, self.workers)
        if len(members) == 1:
            for module in model.modules():  # of an earlier, larger group
                if isinstance(module, GroupBatchNorm):
                    module.leave()
            return 0
        all_reduce = link(members)
        return replace_batch_norm(
            model, lambda old: GroupBatchNorm(old, all_reduce), also=(GroupBatchNorm,)
        )

    @field_validator("evaluation")
    @classmethod
    def _already_large(cls, evaluation: str) -> str:
        if evaluation == "recomputed":
            raise ValueError(
                "a group's statistics can't be computed outside a step; must be running_average or "
                "last_batch"
            )
        return evaluation


class GhostNorm(NormalizationPolicy):
    """Parts of fixed size are normalized, whatever the batch does (arXiv 1705.08741)."""

    kind: Literal["ghost"] = "ghost"
    samples: int = Field(default=32, ge=2)
    """Samples normalized together, about: parts of a micro-batch are as equal as can be."""

    def _replace(self, model: nn.Module, rank: int, world_size: int, link: GroupLink) -> int:
        return replace_batch_norm(model, lambda old: GhostBatchNorm(old, self.samples))


AnyNormalization: TypeAlias = Annotated[
    LocalNorm | GroupNorm | GhostNorm, Field(discriminator="kind")
]
