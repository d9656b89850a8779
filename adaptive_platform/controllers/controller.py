"""The contract of a batch controller: what it is told, what it answers, and the limits between."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, TypeAlias

from pydantic import Field

from adaptive_platform.progress import Progress
from adaptive_platform.settings import Variant
from adaptive_platform.summary import GradientSummary, ThroughputModel

__all__ = [
    "Candidate",
    "Controller",
    "ControllerConfig",
    "Decision",
    "Limits",
    "Need",
    "Observation",
    "settle",
]

Need: TypeAlias = Literal["noise", "layers", "hessian", "throughput", "adversarial"]
"""What a controller reads besides progress: `noise`, S and G2 of the whole gradient; `layers`, the
same of each layer; `hessian`, its top eigenvalue at the end of each epoch; `throughput`, a fitted
model; `adversarial`, that `adversarial_fraction` is acted on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What bounds the global batch, whoever decides it."""

    dataset_size: int
    """Samples in one epoch; the batch is never larger, so every epoch has a step."""
    world_size: int = 1
    smallest_microbatch: int = 1
    """Fewest samples that a worker may get."""
    largest_microbatch: int | None = None
    """Most samples of one pass that a worker's memory holds; larger shares are accumulated. None:
    any."""
    num_nodes: int = 1
    """Nodes that the workers are spread over."""
    min_batch: int | None = None
    """The user's lower bound on the global batch, in samples."""
    max_batch: int | None = None
    """The user's upper bound on the global batch, in samples."""

    @property
    def upper(self) -> int:
        """Largest allowed batch: the user's bound, or all the data."""
        if self.max_batch is None:
            return self.dataset_size
        return min(self.max_batch, self.dataset_size)

    @property
    def lower(self) -> int:
        """Smallest allowed batch. Where bounds contradict each other, the upper one holds."""
        return min(max(self.world_size * self.smallest_microbatch, self.min_batch or 1), self.upper)

    def allows(self, batch: int) -> bool:
        """True when `batch` keeps every limit."""
        return self.lower <= batch <= self.upper

    def clamp(self, batch: float, multiple_of: int = 1) -> tuple[int, str]:
        """The nearest allowed batch, and what stopped `batch`.

        Args:
            batch: Wanted batch in samples; need not be whole, may be infinite.
            multiple_of: Round to a multiple of this, where the limits have room for one.

        Returns:
            A whole batch within the limits, and the limit that moved it (empty for none).
        """
        upper, lower = self.upper, self.lower
        if batch > upper:
            stopped = f"capped at the upper limit of {upper}"
            if upper == self.dataset_size:
                stopped = f"the data size of {upper} caps the batch"
            highest = upper // multiple_of * multiple_of
            return (highest if highest >= lower else upper), stopped
        if batch < lower:
            stopped = f"kept at the lower limit of {lower}"
            if lower > (self.min_batch or 1):
                stopped = f"{self.world_size} workers need at least {lower} samples"
            lowest = -(-lower // multiple_of) * multiple_of
            return (lowest if lowest <= upper else lower), stopped
        nearest = round(batch / multiple_of) * multiple_of
        if nearest > upper:
            nearest -= multiple_of
        if nearest < lower:
            nearest += multiple_of
        return (nearest if self.allows(nearest) else round(batch)), ""

    def narrowed(self, min_batch: int | None, max_batch: int | None) -> Limits:
        """These limits and a controller's own bounds together."""
        lows = [bound for bound in (self.min_batch, min_batch) if bound is not None]
        highs = [bound for bound in (self.max_batch, max_batch) if bound is not None]
        return replace(self, min_batch=max(lows, default=None), max_batch=min(highs, default=None))


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What a controller is told after a committed step; the same on every worker."""

    progress: Progress
    summary: GradientSummary
    global_batch: int
    """The batch in force: what was last decided, not the true size of a short last step."""
    limits: Limits
    throughput: ThroughputModel | None = None
    """The fitted speed of this run. None while nothing was fitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A batch that was weighed."""

    global_batch: int
    note: str
    """Where it comes from, in a few words."""
    score: float | None = None
    """What the controller maximizes, where it compares."""
    microbatch: int | None = None
    """Samples of one pass on one worker that the score assumes."""
    accumulation: int | None = None
    """Micro-batches per worker and step that the score assumes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The next global batch and everything that explains it."""

    global_batch: int
    reason: str
    """One readable line."""
    changed: bool
    """True when the batch differs from the one in force. The loop prints only these."""
    considered: bool = True
    """False while the controller waits for its next turn and weighed nothing."""
    inputs: Mapping[str, float | int | None] = field(default_factory=dict)
    candidates: tuple[Candidate, ...] = ()


class Controller(ABC):
    """Chooses the global batch. Pure: equal observations in equal order give equal decisions.

    The loop calls `decide` after every committed step; a controller paces itself and answers
    cheaply while it waits.
    """

    @abstractmethod
    def decide(self, observation: Observation) -> Decision:
        """The batch of the next step, always within `observation.limits`."""

    @property
    def lr_factor(self) -> float:
        """Factor on the learning rate, besides the learning-rate rule's; read at every step.

        1 except for controllers that stand in for a learning-rate decay.
        """
        return 1.0

    @property
    def adversarial_fraction(self) -> float:
        """Share of each micro-batch to replace by adversarial examples; read at every step."""
        return 0.0

    def state_dict(self) -> dict[str, float | int]:
        """Plain numbers for a checkpoint; empty where nothing is remembered."""
        return {}

    def load_state_dict(self, state: Mapping[str, float | int]) -> None:  # noqa: B027
        """Continue from `state_dict`, bit for bit."""


class ControllerConfig(Variant):
    """Who chooses the global batch."""

    needs: ClassVar[frozenset[Need]] = frozenset()
    """What the loop has to measure for it; a loop that can't refuses the controller early."""
    global_batch: int = Field(default=32, ge=1)
    """Samples per optimizer step over all workers, at the start of the run."""

    @abstractmethod
    def build(self) -> Controller:
        """A controller that has seen nothing."""

    def start(self, limits: Limits) -> Decision:
        """The batch of a new run's first step: `global_batch` as far as the limits allow.

        `changed` says that it could not be had, so that the loop prints why.
        """
        batch, stopped = limits.clamp(self.global_batch)
        why = f", not {self.global_batch}: {stopped}" if stopped else ""
        return Decision(
            global_batch=batch,
            reason=f"batch starts at {batch}" + why,
            changed=batch != self.global_batch,
        )


def settle(
    observation: Observation,
    wanted: float,
    why: str,
    *,
    limits: Limits | None = None,
    inputs: Mapping[str, float | int | None] | None = None,
    candidates: tuple[Candidate, ...] = (),
) -> Decision:
    """The decision for a wanted batch, brought within the limits.

    Args:
        observation: What the controller was told.
        wanted: The batch it would choose without limits.
        why: Its reason, the start of the decision's line.
        limits: Tighter limits than the observation's.
        inputs: The numbers that the reason rests on.
        candidates: What else was weighed.
    """
    batch, stopped = (limits or observation.limits).clamp(wanted)
    before = observation.global_batch
    return Decision(
        global_batch=batch,
        reason=why + (f"; {stopped}" if stopped else ""),
        changed=batch != before,
        inputs=inputs or {},
        candidates=candidates,
    )
