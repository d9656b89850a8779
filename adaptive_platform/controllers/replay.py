"""What another controller would have done with a recorded run's noise, in steps and in time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from adaptive_platform.controllers.controller import (
    ControllerConfig,
    Decision,
    Limits,
    Observation,
)
from adaptive_platform.controllers.goodput import split_of
from adaptive_platform.progress import Progress
from adaptive_platform.summary import GradientSummary, ThroughputModel

__all__ = ["Recorded", "Replay", "replay"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """One committed step of a recorded run."""

    scale_invariant_steps: float
    """Training done before the step, in steps of the base batch."""
    summary: GradientSummary
    """The statistics after the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """The course that a controller would have taken to the same amount of learning."""

    decisions: tuple[tuple[Progress, Decision], ...]
    """Every decision that weighed its inputs, and where the run stood."""
    batches: tuple[int, ...]
    """Samples of each step."""
    learned: tuple[float, ...]
    """Scale-invariant steps before each step."""
    progress: Progress
    """Where it ends: steps, samples, epochs."""
    seconds: float | None
    """Predicted time of all steps. None without a throughput model."""


def replay(
    config: ControllerConfig,
    recorded: Sequence[Recorded],
    *,
    learned: float,
    base_batch: int,
    limits: Limits,
    throughput: ThroughputModel | None = None,
    advance: Callable[[float], float] = float,
) -> Replay:
    """Drive a controller through recorded noise until as much is learned as was recorded.

    Learning is counted in scale-invariant steps (AdaScale, arXiv 2007.05105), and the noise is
    taken to depend on how much was learned. Not promised: that another batch would have met
    exactly this noise, or that a gain predicts accuracy.

    Args:
        config: The controller to try; `global_batch` is its start.
        recorded: Steps in their order.
        learned: Scale-invariant steps at which to stop.
        base_batch: The batch that those steps refer to.
        limits: Data size, workers and bounds of the replayed run.
        throughput: Predicts the time of a step, and is shown to the controller.
        advance: What a step of a gain counts for, as `LrRuleConfig.advance`; the gain itself where
            nothing caps it.

    Raises:
        ValueError: Nothing was recorded.
    """
    if not recorded:
        raise ValueError("recorded is empty: a replay needs at least one step")
    controller = config.build()
    batch, _ = limits.clamp(config.global_batch)
    progress = Progress(dataset_size=limits.dataset_size)
    decisions: list[tuple[Progress, Decision]] = []
    batches: list[int] = []
    learned_before: list[float] = []
    seconds, position = 0.0, 0
    while progress.scale_invariant_steps < learned:
        done = progress.scale_invariant_steps
        while position + 1 < len(recorded) and recorded[position + 1].scale_invariant_steps <= done:
            position += 1
        summary = recorded[position].summary
        taken = min(batch, limits.dataset_size - progress.cursor)
        progress = progress.committed(taken, taken, advance(summary.gain(taken, base_batch)))
        batches.append(taken)
        learned_before.append(done)
        if throughput is not None:
            split = split_of(taken, limits)
            seconds += throughput.step_seconds(limits.world_size, limits.num_nodes, *split)
        decision = controller.decide(
            Observation(
                progress=progress,
                summary=summary,
                global_batch=batch,
                limits=limits,
                throughput=throughput,
            )
        )
        if decision.considered:
            decisions.append((progress, decision))
        batch = decision.global_batch
    return Replay(
        decisions=tuple(decisions),
        batches=tuple(batches),
        learned=tuple(learned_before),
        progress=progress,
        seconds=seconds if throughput is not None else None,
    )
