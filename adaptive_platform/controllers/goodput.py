"""A batch that maximizes goodput: throughput times statistical efficiency (Pollux, OSDI 2021)."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from pydantic import Field

from adaptive_platform.controllers.adaptive import AdaptiveConfig, AdaptiveController, Target
from adaptive_platform.controllers.controller import Candidate, Limits, Need, Observation
from adaptive_platform.summary import GradientSummary, ThroughputModel

__all__ = ["Goodput", "GoodputConfig", "split_of"]


class GoodputConfig(AdaptiveConfig):
    """Aim for the most useful samples per second on today's workers.

    `global_batch` is Pollux's M0: no smaller batch is considered.
    """

    kind: Literal["goodput"] = "goodput"
    needs: ClassVar[frozenset[Need]] = frozenset({"noise", "throughput"})
    num_candidates: int = Field(default=50, ge=2)
    """Batches compared, in geometric steps between the bounds."""
    min_gain: float = Field(default=0.05, ge=0.0)
    """Relative rise of predicted goodput above which a new batch is adopted."""

    def build(self) -> Goodput:
        """A controller that has seen nothing."""
        return Goodput(self)


def split_of(batch: int, limits: Limits) -> tuple[int, int]:
    """Micro-batch and accumulation of a batch, in as few passes as memory allows.

    One worker makes two passes at least, since noise can't be told from a single micro-batch.
    """
    share = math.ceil(batch / limits.world_size)
    passes = 1 if limits.largest_microbatch is None else -(-share // limits.largest_microbatch)
    if limits.world_size == 1 and share > 1:
        passes = max(passes, 2)
    return math.ceil(share / passes), passes


class Goodput(AdaptiveController):
    """Compares candidates by model; holds without a throughput model or without signal."""

    def __init__(self, config: GoodputConfig) -> None:
        super().__init__(config)
        self._base = config.global_batch
        self._num_candidates = config.num_candidates
        self._min_gain = config.min_gain

    def target(self, observation: Observation) -> Target:
        """See `AdaptiveController.target`."""
        summary, model = observation.summary, observation.throughput
        inputs = {"noise_scale": summary.noise_scale, "observations": summary.observations}
        if model is None:
            return Target(batch=None, why="no throughput model yet, hold", inputs=inputs)
        if summary.noise_scale is None:
            return Target(batch=None, why="noise hides the signal, hold", inputs=inputs)
        limits = self.bounds(observation)
        low = min(max(self._base, limits.lower), limits.upper)
        growth = (limits.upper / low) ** (1.0 / (self._num_candidates - 1))
        batches = sorted({round(low * growth**n) for n in range(self._num_candidates)})
        candidates = tuple(self._candidate(batch, limits, summary, model) for batch in batches)
        now = self._candidate(observation.global_batch, limits, summary, model)
        best = max(candidates, key=_score)
        gain = _score(best) / _score(now) - 1.0 if _score(now) > 0.0 else 0.0
        inputs |= {
            "goodput": now.score,
            "best_goodput": best.score,
            "goodput_gain": gain,
            "throughput_fit_error": model.fit_error,
        }
        if gain <= self._min_gain:
            why = f"goodput {_score(now):.4g}/s; {best.global_batch} would bring {gain:+.1%}"
            return Target(batch=None, why=why, inputs=inputs, candidates=candidates)
        return Target(
            batch=best.global_batch,
            why=f"goodput {_score(now):.4g}/s -> {_score(best):.4g}/s at {best.global_batch}",
            inputs=inputs,
            candidates=candidates,
        )

    def _candidate(
        self, batch: int, limits: Limits, summary: GradientSummary, model: ThroughputModel
    ) -> Candidate:
        microbatch, accumulation = split_of(batch, limits)
        seconds = model.step_seconds(limits.world_size, limits.num_nodes, microbatch, accumulation)
        efficiency = summary.efficiency(batch, self._base)
        goodput = batch / seconds * efficiency if seconds > 0.0 else 0.0
        return Candidate(
            global_batch=batch,
            note="goodput in useful samples per second",
            score=goodput if math.isfinite(goodput) else 0.0,
            microbatch=microbatch,
            accumulation=accumulation,
        )


def _score(candidate: Candidate) -> float:
    assert candidate.score is not None
    return candidate.score
