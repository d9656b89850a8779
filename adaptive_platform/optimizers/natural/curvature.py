"""The factors of all layers: collected, reduced, kept by their owners, inverted, applied.

Only a layer's owner keeps and inverts its factors; its gradient workers hold the inverses; the
others receive the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from adaptive_platform.optimizers.exchange import Exchange
from adaptive_platform.optimizers.natural.blocks import KroneckerBlock, Statistic, UnitBlock
from adaptive_platform.optimizers.natural.coverage import Layer
from adaptive_platform.optimizers.natural.curvature_state import load_layers, saved_layers
from adaptive_platform.optimizers.natural.factor_forms import similar
from adaptive_platform.optimizers.natural.inverses import InverseMethod
from adaptive_platform.optimizers.natural.inversion import (
    REJECTED,
    Inversion,
    Moment,
    similarity,
)
from adaptive_platform.optimizers.natural.preconditioning import (
    precondition_layers,
    precondition_norms,
)
from adaptive_platform.optimizers.natural.reduction import reduce_statistics
from adaptive_platform.optimizers.natural.refresh import Candidate, RefreshPolicy, choose
from adaptive_platform.optimizers.natural.workers import Workers

__all__ = ["Curvature", "CurvatureRules"]


@dataclass(frozen=True, slots=True)
class CurvatureRules:
    """What stays the same over a run."""

    policy: RefreshPolicy
    """When factors and inverses are made anew."""
    method: InverseMethod
    """How factors are inverted."""
    tolerance: float
    """alpha: relative change up to which two values of a factor count as similar."""
    refresh_share: float
    """Work of refreshing per step, on average, over that of forward and backward passes."""
    worker_fraction: float
    """Share of the workers that precondition a layer."""
    tolerated_failures: int
    """Failed refreshes of a layer in a row after which the run ends."""
    norm_damping_scale: float
    """Damping of norm layers over that of the others."""


class Curvature:
    """See the module.

    Args:
        layers: What is preconditioned.
        exchange: All workers.
        rules: The settings.
        warn: Called on the first worker, once per layer that falls back.

    Raises:
        UserError: The worker fraction needs groups that `exchange` can't make.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        exchange: Exchange,
        rules: CurvatureRules,
        warn: Callable[[str], None],
    ) -> None:
        rows = rules.policy.newest_only and rules.method == "cholesky"
        self.blocks = [
            UnitBlock(each) if each.is_norm else KroneckerBlock(each, keeps_rows=rows)
            for each in layers
        ]
        self._kronecker = [each for each in self.blocks if isinstance(each, KroneckerBlock)]
        self._units = [each for each in self.blocks if isinstance(each, UnitBlock)]
        self._rules = rules
        self._credit = 0.0
        """Work that refreshing may do before it must wait; equal on all workers."""
        self.workers = Workers(exchange, rules.worker_fraction)
        """Who keeps and applies which layer."""
        self._inversion = Inversion(
            rules.policy, rules.method, self.workers, rules.tolerated_failures, warn
        )

    # --- a step -------------------------------------------------------------------------------

    def plan(self, step: int) -> None:
        """Decide what the step collects; the same on every worker."""
        due = [part for part in self._statistics() if part.state.due <= step]
        candidates = [Candidate(step - p.state.due, self._cost(p), p.state.count == 0) for p in due]
        for index in choose(candidates, self._credit):
            due[index].wanted = True

    def record(
        self, index: int, module: nn.Module, inputs: Tensor, gradients: Tensor, scale: float
    ) -> None:
        """Take in one backward through one use of a layer; a `Receiver`."""
        self.blocks[index].record(module, inputs, gradients, scale)

    def clear(self) -> None:
        """Forget what the step in hand collected."""
        for block in self.blocks:
            block.clear()

    def update(self, step: int, samples: int, damping: float, batch_ratio: float) -> None:
        """Take in what all workers collected, and invert what is due.

        Args:
            step: Committed steps so far.
            samples: Samples of the step, over all workers.
            damping: lam.
            batch_ratio: This step's batch over the reference batch.

        Raises:
            RunFailedError: A layer failed too often in a row; on every worker alike.
        """
        moment = Moment(step, damping, batch_ratio)
        seen = reduce_statistics(self.blocks, self.workers, samples)
        self._credit -= sum(self._cost(each.part) for each in seen if each.part.state.count > 0)
        codes = {
            each.part.name: self._judge(each.part, batch_ratio)
            for each in seen
            if self.workers.keeps(each.part)
        }
        names = {each.part.name for each in seen}
        again, cost = self._inversion.due(self._kronecker, names, moment, self._credit)
        self._credit -= cost
        touched = [each.block for each in seen if isinstance(each.block, KroneckerBlock)]
        self._inversion.run(list(dict.fromkeys([*touched, *again])), again, codes, moment)
        for unit in self._units:
            code = codes.get(unit.fisher.name, 0.0)
            if 0.0 < code < REJECTED:
                unit.fisher.accept()
                unit.fisher.state = self._rules.policy.after(
                    unit.fisher.state, step, **similarity(code), batch_ratio=batch_ratio
                )
        income = self._rules.refresh_share * sum(block.pass_cost for block in self._kronecker)
        self._credit = min(self._credit + income, income)
        self.clear()

    def directions(self, damping: float) -> dict[nn.Parameter, Tensor]:
        """Preconditioned gradients of the layers that have curvature; `.grad` is only read.

        Args:
            damping: lam.
        """
        norms = precondition_norms(self._units, damping * self._rules.norm_damping_scale)
        return norms | precondition_layers(self._kronecker, self.workers, damping)

    def _judge(self, part: Statistic, batch_ratio: float) -> float:
        """Take a reduced value in; a code says how it compares with those before."""
        new = part.total
        assert new is not None
        if not bool(new.isfinite().all()):
            return REJECTED
        policy, tolerance = self._rules.policy, self._rules.tolerance
        code = 1.0
        if policy.keeps_older and part.value is not None and part.older is not None:
            code += float(similar(new, part.value, tolerance))
            code += 2.0 * float(similar(new, part.older, tolerance))
        if policy.keeps_older:
            part.older = part.value
        part.value = policy.merge(part.value, new, part.state.count, batch_ratio)
        return code

    # --- state --------------------------------------------------------------------------------

    @property
    def num_bytes(self) -> int:
        """Bytes of factors and inverses that this worker keeps between steps."""
        kept = [t for p in self._statistics() for t in (p.value, p.older) if t is not None]
        kept += [t for b in self._kronecker for inverse in b.inverse.values() for t in inverse]
        return sum(tensor.nbytes for tensor in kept)

    def state(self) -> dict[str, Any]:
        """Everything, by layer name, on every worker. All workers call it together."""
        layers = saved_layers(
            self.blocks,
            self.workers,
            self._rules.method,
            keeps_older=self._rules.policy.keeps_older,
        )
        return {"credit": self._credit, "layers": layers}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Continue from `state`, under today's placement.

        Raises:
            CheckpointError: For other layers.
        """
        load_layers(self.blocks, saved["layers"], self.workers, self._rules.method)
        self._credit = float(saved["credit"])

    def _statistics(self) -> Iterator[Statistic]:
        for block in self.blocks:
            yield from block.parts.values()

    def _cost(self, part: Statistic) -> float:
        """Of collecting a statistic, and of inverting it where that comes with it."""
        follows = self._rules.policy.inverse_interval is None
        return part.cost + (part.inverse_cost if follows else 0.0)
