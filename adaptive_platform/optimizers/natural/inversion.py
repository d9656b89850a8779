"""Makes inverses on the owners, and lets all workers agree on what came of it.

What must be the same everywhere (intervals, failures, which inverses exist) is decided by a layer's
owner and spread in one small message.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from adaptive_platform.errors import RunFailedError
from adaptive_platform.optimizers.natural.blocks import KroneckerBlock
from adaptive_platform.optimizers.natural.damping import split_damping
from adaptive_platform.optimizers.natural.factor_forms import is_rows, mean_diagonal
from adaptive_platform.optimizers.natural.inverse_shapes import (
    flat_inverse,
    flat_length,
    inverse_of,
)
from adaptive_platform.optimizers.natural.inverses import (
    InverseMethod,
    cholesky_inverse,
    eigen_decomposition,
    newton_schulz_inverse,
    robust_inverse,
    row_inverse,
)
from adaptive_platform.optimizers.natural.refresh import (
    Candidate,
    RefreshPolicy,
    choose,
    in_steps,
)
from adaptive_platform.optimizers.natural.workers import Workers

__all__ = ["REJECTED", "Inversion", "Moment", "similarity"]

REJECTED = 8.0
"""Code of a value that was not finite; others are 1, plus 1 and 2 for similarity."""
_DAMPING_DRIFT = math.log(1.5)
"""Change of the damping, as a logarithm, beyond which inverses are made again."""
_KEYS = ("inputs", "outputs")


@dataclass(frozen=True, slots=True)
class Moment:
    """The step in hand."""

    step: int
    """Committed steps so far."""
    damping: float
    """lam."""
    batch_ratio: float
    """This step's batch over the reference batch."""


class Inversion:
    """Keeps every layer's inverses up to date.

    Args:
        policy: When inverses are made anew.
        method: How.
        workers: Who makes them, and who needs them.
        tolerated_failures: Failures of a layer in a row after which the run ends.
        warn: Called on the first worker, once per layer that falls back.
    """

    def __init__(
        self,
        policy: RefreshPolicy,
        method: InverseMethod,
        workers: Workers,
        tolerated_failures: int,
        warn: Callable[[str], None],
    ) -> None:
        self._policy = policy
        self._method = method
        self._workers = workers
        self._tolerated_failures = tolerated_failures
        self._warn = warn
        self._warned: set[str] = set()

    def due(
        self, blocks: Sequence[KroneckerBlock], seen: set[str], moment: Moment, credit: float
    ) -> tuple[list[KroneckerBlock], float]:
        """Layers whose inverses are both made in this step, whatever was collected.

        Args:
            blocks: All layers.
            seen: Names of the statistics that were collected.
            moment: The step.
            credit: Work that may be done.

        Returns:
            The layers, and the work of those that could have waited.
        """
        due: list[KroneckerBlock] = []
        candidates: list[Candidate] = []
        own_interval = self._policy.inverse_interval is not None
        for block in blocks:
            if not all(p.state.count > 0 or p.name in seen for p in block.parts.values()):
                continue
            drift = (
                self._method != "eigen"
                and block.ready
                and abs(math.log(moment.damping / block.inverse_damping)) > _DAMPING_DRIFT
            )
            late = own_interval and block.inverse_due <= moment.step
            if drift or late or not block.ready:
                due.append(block)
                overdue = max(0, moment.step - block.inverse_due)
                candidates.append(Candidate(overdue, block.inverse_cost, not block.ready))
        chosen = choose(candidates, credit)
        cost = sum(candidates[i].cost for i in chosen if not candidates[i].urgent)
        return [due[index] for index in chosen], cost

    def run(
        self,
        touched: Sequence[KroneckerBlock],
        again: Sequence[KroneckerBlock],
        codes: Mapping[str, float],
        moment: Moment,
    ) -> None:
        """Invert what is due, and spread it.

        Args:
            touched: Layers with a new factor, and those of `again`.
            again: Layers whose inverses are both made.
            codes: How each new value of this worker's own layers compares with those before.
            moment: The step.

        Raises:
            RunFailedError: A layer failed too often in a row; on every worker alike.
        """
        status = torch.zeros(len(touched), 5, dtype=torch.float64)
        for row, block in zip(status, touched, strict=True):
            if self._workers.owns(block):
                found = self._invert(block, codes, moment.damping, both=block in again)
                row.copy_(torch.tensor(found))
        if touched and self._workers.world_size > 1:
            moved = status.to(touched[0].layer.weight.device)
            self._workers.all.all_reduce(moved)
            status = moved.cpu()
        made: list[tuple[KroneckerBlock, str]] = []
        for block, row in zip(touched, status.tolist(), strict=True):
            made += self._agree(block, row, moment)
        self._spread(made)
        self._check(touched)

    def _invert(
        self, block: KroneckerBlock, codes: Mapping[str, float], damping: float, *, both: bool
    ) -> list[float]:
        """On the owner: `[code of A, code of G, A inverted, G inverted, failed]`."""
        own = [codes.get(block.parts[key].name, 0.0) for key in _KEYS]
        failed = REJECTED in own
        done = [0.0, 0.0]
        a, g = (block.parts[key].value for key in _KEYS)
        if a is not None and g is not None:
            dampings = split_damping(damping, mean_diagonal(a), mean_diagonal(g))
            follows = self._policy.inverse_interval is None
            for index, (key, value) in enumerate(zip(_KEYS, (a, g), strict=True)):
                if not (both or (follows and 0.0 < own[index] < REJECTED)):
                    continue
                if self._method == "eigen":
                    found = robust_inverse(value, damping, eigen_decomposition)
                else:
                    found = robust_inverse(value, dampings[index], self._inverter(block, key))
                if found is None:
                    failed = True
                else:
                    block.inverse[key] = found
                    done[index] = 1.0
        return [*own, *done, float(failed)]

    def _inverter(
        self, block: KroneckerBlock, key: str
    ) -> Callable[[Tensor, float], tuple[Tensor, ...]]:
        value = block.parts[key].value
        assert value is not None
        if is_rows(value):
            return row_inverse
        if self._method == "cholesky":
            return cholesky_inverse
        start = block.inverse.get(key, (None,))[0]

        def invert(matrix: Tensor, damping: float) -> tuple[Tensor, ...]:
            warm = None if start is None else start.to(matrix.dtype)
            return newton_schulz_inverse(matrix, damping, warm)

        return invert

    def _agree(
        self, block: KroneckerBlock, row: list[float], moment: Moment
    ) -> list[tuple[KroneckerBlock, str]]:
        """Let an owner's findings become everyone's state; which inverses are new."""
        policy, step = self._policy, moment.step
        failed = row[4] > 0.0
        new = [key for key, done in zip(_KEYS, row[2:4], strict=True) if done > 0.0]
        for key, code in zip(_KEYS, row[:2], strict=True):
            part = block.parts[key]
            if 0.0 < code < REJECTED:
                part.accept()
                part.state = policy.after(
                    part.state, step, **similarity(code), batch_ratio=moment.batch_ratio
                )
                if failed:
                    part.state = replace(part.state, due=step + 1)
        block.inverted.update({key: block.parts[key].rows for key in new})
        if len(new) == 2:
            block.inverse_damping = moment.damping
            if policy.inverse_interval is not None:
                block.inverse_due = step + in_steps(policy.inverse_interval, moment.batch_ratio)
        if failed:
            block.failures += 1
            self._warn_once(block)
        elif new or any(0.0 < code < REJECTED for code in row[:2]):
            block.failures = 0
        return [(block, key) for key in new]

    def _spread(self, made: Sequence[tuple[KroneckerBlock, str]]) -> None:
        """From the owners to the gradient workers of their layers."""
        workers = self._workers
        if workers.column.world_size == 1:
            return
        for source, rank in enumerate(workers.column_ranks):
            for block, key in made:
                if workers.placement(block).owner != rank:
                    continue
                side, rows = block.parts[key].side, block.inverted[key]
                length = flat_length(self._method, side, rows)
                flat = block.layer.weight.new_empty(length, dtype=block.dtype)
                if workers.owns(block):
                    flat.copy_(flat_inverse(block.inverse[key]))
                workers.column.broadcast(flat, source)
                if not workers.owns(block):
                    block.inverse[key] = inverse_of(flat, self._method, side, rows)

    def _check(self, touched: Sequence[KroneckerBlock]) -> None:
        for block in touched:
            if block.failures > self._tolerated_failures:
                raise RunFailedError(
                    f"optimizer: the factors of layer `{block.name}` could not be inverted "
                    f"{block.failures} times in a row. Raise optimizer.damping, lower "
                    "optimizer.lr, or raise optimizer.tolerated_failures."
                )

    def _warn_once(self, block: KroneckerBlock) -> None:
        if block.name in self._warned or self._workers.rank != 0:
            return
        self._warned.add(block.name)
        fallback = "its last good inverse" if block.ready else "the plain gradient"
        self._warn(
            f"the factors of layer `{block.name}` are singular or not finite: it uses {fallback} "
            "until they can be inverted again. More damping helps."
        )


def similarity(code: float) -> dict[str, bool]:
    """What a code below `REJECTED` says, as arguments of `RefreshPolicy.after`."""
    bits = int(code) - 1
    return {"to_last": bool(bits & 1), "to_older": bool(bits & 2)}
