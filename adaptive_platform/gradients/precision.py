"""Number formats of a step: autocast, and a loss scale that all workers move alike."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from adaptive_platform.settings import Settings

__all__ = ["LossScale", "PrecisionConfig"]


class PrecisionConfig(Settings):
    """Number format of forward and backward, and what happens to non-finite steps."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Autocast type of forward; weights, statistics and optimizer stay in float32."""
    loss_scale: Annotated[float, Field(gt=0)] = 65536.0
    """First loss scale with float16; not used with the other types."""
    loss_scale_growth_steps: Annotated[int, Field(ge=1)] = 2000
    """Committed steps without overflow after which the loss scale doubles."""
    max_skipped_in_a_row: Annotated[int, Field(ge=1)] = 10
    """Consecutive non-finite steps after which the run stops and names the parameter."""

    def autocast(self, device_type: str) -> AbstractContextManager[Any]:
        """Context for forward and loss on `device_type`."""
        if self.dtype == "float32":
            return nullcontext()
        return torch.autocast(device_type, dtype=getattr(torch, self.dtype))

    def first_scale(self) -> LossScale:
        """The loss scale at the start of a run; fixed at 1 unless the type is float16."""
        if self.dtype != "float16":
            return LossScale(value=1.0, growth_steps=0)
        return LossScale(value=self.loss_scale, growth_steps=self.loss_scale_growth_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """Dynamic loss scale as a value: the vote of the step decides, so every worker agrees.

    torch's GradScaler decides from what one process sees; here one worker's overflow has to halve
    the scale on all of them, and the value belongs in the checkpoint.
    """

    value: float
    growth_steps: int
    """Good steps before it doubles; 0 means that the scale is fixed."""
    good_steps: int = 0

    def after(self, *, overflow: bool) -> LossScale:
        """The scale for the next step: half after an overflow, double after enough good steps."""
        if self.growth_steps == 0:
            return self
        if overflow:
            return replace(self, value=self.value / 2.0, good_steps=0)
        if self.good_steps + 1 >= self.growth_steps:
            return replace(self, value=self.value * 2.0, good_steps=0)
        return replace(self, good_steps=self.good_steps + 1)

    def going_on(self, saved: LossScale) -> LossScale:
        """The scale of a run that goes on from a checkpoint with `saved`; this one is the recipe's.

        Where one of them is fixed the number format was changed, and what it came to means nothing.
        """
        if self.growth_steps == 0 or saved.growth_steps == 0:
            return self
        return replace(saved, growth_steps=self.growth_steps)

    def state_dict(self) -> dict[str, int | float]:
        """Plain numbers for a checkpoint; `LossScale(**state)` is the way back."""
        return asdict(self)
