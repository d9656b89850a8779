"""The factors of all layers: collected, reduced, kept by their owners, inverted, applied.

Sums over samples are reduced over all workers, so shares may be uneven. Only a layer's owner keeps
and inverts its factors; its gradient workers hold the inverses; the others receive the result.
What all workers must agree on (intervals, failures) is decided by the owner and spread in one
small message.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from adaptive_platform.errors import CheckpointError, RunFailedError, UserError
from adaptive_platform.optimizers.exchange import Exchange
from adaptive_platform.optimizers.natural.assignment import Grid, gradient_workers, place
from adaptive_platform.optimizers.natural.blocks import (
    KroneckerBlock,
    Statistic,
    UnitBlock,
    layer_matrix,
)
from adaptive_platform.optimizers.natural.coverage import Layer
from adaptive_platform.optimizers.natural.damping import split_damping
from adaptive_platform.optimizers.natural.inverses import (
    InverseMethod,
    cholesky_inverse,
    eigen_decomposition,
    kronecker_solve,
    newton_schulz_inverse,
    robust_inverse,
)
from adaptive_platform.optimizers.natural.packing import pack, packed_length, unpack
from adaptive_platform.optimizers.natural.refresh import (
    Candidate,
    RefreshPolicy,
    RefreshState,
    choose,
    in_steps,
    similar,
)

__all__ = ["Curvature", "CurvatureRules"]

_MESSAGE_ELEMENTS = 8 * 2**20
"""Factors are reduced in messages of about this size, which bounds the extra memory."""
_DAMPING_DRIFT = math.log(1.5)
"""Change of the damping, as a logarithm, beyond which inverses are made again."""
_KEYS = ("inputs", "outputs")
_REJECTED = 8.0


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
        self.blocks = [UnitBlock(each) if each.is_norm else KroneckerBlock(each) for each in layers]
        self._kronecker = [each for each in self.blocks if isinstance(each, KroneckerBlock)]
        self._units = [each for each in self.blocks if isinstance(each, UnitBlock)]
        self._exchange = exchange
        self._rules = rules
        self._warn = warn
        self._warned: set[str] = set()
        self._credit = 0.0
        """Work that refreshing may do before it must wait; equal on all workers."""
        world, rank = exchange.world_size, exchange.rank
        grid = Grid(world, gradient_workers(world, rules.worker_fraction))
        costs = [block.inverse_cost for block in self._kronecker]
        self.placements = dict(
            zip([block.name for block in self._kronecker], place(costs, grid), strict=True)
        )
        self._column_ranks = grid.column(rank)
        try:
            self._column = exchange.among(self._column_ranks)
            self._row = exchange.among(grid.row(rank))
        except ValueError as error:
            raise UserError(
                f"optimizer.gradient_worker_fraction = {rules.worker_fraction:g}: between one and "
                f"all of {world} workers would need groups of them, which can't be made here. Set "
                "it to 0 or 1."
            ) from error

    # --- a step -------------------------------------------------------------------------------

    def plan(self, step: int) -> None:
        """Decide what the step collects; the same on every worker."""
        parts = list(self._statistics())
        due = [part for part in parts if part.state.due <= step]
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
        seen = self._reduce(samples)
        self._credit -= sum(self._cost(part) for _, part in seen if part.state.count > 0)
        codes = {part.name: self._judge(part, batch_ratio) for _, part in seen if self._keeps(part)}
        touched = list(dict.fromkeys(b for b, _ in seen if isinstance(b, KroneckerBlock)))
        again = self._due_inverses(step, damping, {part.name for _, part in seen})
        touched += [block for block in again if block not in touched]
        status = torch.zeros(len(touched), 5, dtype=torch.float64)
        for row, block in zip(status, touched, strict=True):
            if self._owns(block):
                row.copy_(torch.tensor(self._invert(block, codes, block in again, damping)))
        if touched and self._exchange.world_size > 1:
            device = touched[0].layer.weight.device
            moved = status.to(device)
            self._exchange.all_reduce(moved)
            status = moved.cpu()
        after = self._rules.policy.after
        for unit in self._units:
            code = codes.get(unit.fisher.name, 0.0)
            if 0.0 < code < _REJECTED:
                unit.fisher.state = after(
                    unit.fisher.state, step, **_similarity(code), batch_ratio=batch_ratio
                )
        sent: list[tuple[KroneckerBlock, str]] = []
        for block, row in zip(touched, status.tolist(), strict=True):
            sent += self._agree(block, row, step, damping, batch_ratio, again=block in again)
        self._spread_inverses(sent)
        income = self._rules.refresh_share * sum(block.pass_cost for block in self._kronecker)
        self._credit = min(self._credit + income, income)
        self.clear()
        self._check_failures(touched)

    def directions(self, damping: float) -> dict[nn.Parameter, Tensor]:
        """Preconditioned gradients of the layers that have curvature; `.grad` is only read.

        Args:
            damping: lam.
        """
        found: dict[nn.Parameter, Tensor] = {}
        for unit in self._units:
            scale, shift = unit.layer.weight, unit.layer.bias
            assert shift is not None
            if unit.ready and scale.grad is not None and shift.grad is not None:
                grads = scale.grad.to(unit.dtype), shift.grad.to(unit.dtype)
                solved = unit.solve(*grads, damping * self._rules.norm_damping_scale)
                found[scale], found[shift] = solved
        active = [block for block in self._kronecker if block.ready and _has_gradient(block)]
        mine: dict[str, Tensor] = {}
        for block in active:
            if self._exchange.rank in self.placements[block.name].workers:
                mine[block.name] = self._solve(block, damping)
        if self._row.world_size > 1 and active:
            mine = self._swap(active, mine)
        for block in active:
            matrix, layer = mine[block.name], block.layer
            if layer.bias is not None:
                matrix, found[layer.bias] = matrix[:, :-1], matrix[:, -1]
            found[layer.weight] = matrix.reshape(layer.weight.shape)
        return found

    # --- collecting and judging ---------------------------------------------------------------

    def _reduce(self, samples: int) -> list[tuple[KroneckerBlock | UnitBlock, Statistic]]:
        """Sum everyone's parts; leaves the means in `total` on workers that keep them.

        A layer that nobody used gives nothing and stays due.
        """
        wanted = [block for block in self.blocks if block.wanted]
        if not wanted:
            return []
        device = wanted[0].layer.weight.device
        counts = torch.tensor(
            [float(block.positions) for block in wanted], dtype=torch.float64, device=device
        )
        if self._exchange.world_size > 1:
            self._exchange.all_reduce(counts)
        positions = dict(zip([block.name for block in wanted], counts.tolist(), strict=True))
        seen = [
            (block, part)
            for block in wanted
            for part in block.parts.values()
            if part.wanted and positions[block.name] > 0
        ]
        if self._exchange.world_size > 1:
            self._sum(seen)
        for block, part in seen:
            count = positions[block.name] if part.name.endswith(".outputs") else float(samples)
            block.account(positions[block.name])
            if part.total is not None:
                part.total /= count
        return seen

    def _sum(self, seen: list[tuple[KroneckerBlock | UnitBlock, Statistic]]) -> None:
        sizes = [
            packed_length(part.side) if part.side else 3 * block.layer.weight.numel()
            for block, part in seen
        ]
        start = 0
        while start < len(seen):
            end, held = start, 0
            dtype = seen[start][0].dtype
            while (
                end < len(seen)
                and seen[end][0].dtype is dtype
                and (end == start or held + sizes[end] <= _MESSAGE_ELEMENTS)
            ):
                held += sizes[end]
                end += 1
            self._sum_message(seen[start:end], sizes[start:end])
            start = end

    def _sum_message(
        self, seen: list[tuple[KroneckerBlock | UnitBlock, Statistic]], sizes: list[int]
    ) -> None:
        weight, dtype = seen[0][0].layer.weight, seen[0][0].dtype
        flat = torch.zeros(sum(sizes), dtype=dtype, device=weight.device)
        pieces = flat.split(sizes)
        for (_, part), piece in zip(seen, pieces, strict=True):
            if part.total is not None:
                piece.copy_(pack(part.total) if part.side else part.total.flatten())
        self._exchange.all_reduce(flat)
        for (_, part), piece in zip(seen, pieces, strict=True):
            part.total = None
            if self._keeps(part):
                part.total = unpack(piece) if part.side else piece.reshape(3, -1).clone()

    def _judge(self, part: Statistic, batch_ratio: float) -> float:
        """Take a reduced value in; a code says how it compares with those before."""
        new = part.total
        assert new is not None
        if not bool(new.isfinite().all()):
            return _REJECTED
        policy, tolerance = self._rules.policy, self._rules.tolerance
        code = 1.0
        if policy.keeps_older and part.value is not None and part.older is not None:
            code += float(similar(new, part.value, tolerance))
            code += 2.0 * float(similar(new, part.older, tolerance))
        if policy.keeps_older:
            part.older = part.value
        part.value = policy.merge(part.value, new, part.state.count, batch_ratio)
        return code

    # --- inverses -----------------------------------------------------------------------------

    def _due_inverses(self, step: int, damping: float, seen: set[str]) -> list[KroneckerBlock]:
        """Layers whose inverses are both made in this step, whatever was collected."""
        due: list[KroneckerBlock] = []
        candidates: list[Candidate] = []
        own_interval = self._rules.policy.inverse_interval is not None
        for block in self._kronecker:
            if not all(p.state.count > 0 or p.name in seen for p in block.parts.values()):
                continue
            drift = (
                self._rules.method != "eigen"
                and block.ready
                and abs(math.log(damping / block.inverse_damping)) > _DAMPING_DRIFT
            )
            late = own_interval and block.inverse_due <= step
            if drift or late or not block.ready:
                due.append(block)
                overdue = max(0, step - block.inverse_due)
                candidates.append(Candidate(overdue, block.inverse_cost, not block.ready))
        chosen = choose(candidates, self._credit)
        self._credit -= sum(candidates[i].cost for i in chosen if not candidates[i].urgent)
        return [due[index] for index in chosen]

    def _invert(
        self, block: KroneckerBlock, codes: dict[str, float], again: bool, damping: float
    ) -> list[float]:
        """On the owner: `[code of A, code of G, A inverted, G inverted, failed]`."""
        own = [codes.get(block.parts[key].name, 0.0) for key in _KEYS]
        failed = _REJECTED in own
        done = [0.0, 0.0]
        values = [block.parts[key].value for key in _KEYS]
        a, g = values
        if a is not None and g is not None:
            dampings = split_damping(
                damping, float(a.diagonal().mean()), float(g.diagonal().mean())
            )
            follows = self._rules.policy.inverse_interval is None
            for index, key in enumerate(_KEYS):
                if not (again or (follows and 0.0 < own[index] < _REJECTED)):
                    continue
                value = values[index]
                assert value is not None
                if self._rules.method == "eigen":
                    found = robust_inverse(value, damping, eigen_decomposition)
                else:
                    found = robust_inverse(value, dampings[index], self._dense(block, key))
                if found is None:
                    failed = True
                else:
                    block.inverse[key] = found
                    done[index] = 1.0
        return [*own, *done, float(failed)]

    def _dense(
        self, block: KroneckerBlock, key: str
    ) -> Callable[[Tensor, float], tuple[Tensor, ...]]:
        if self._rules.method == "cholesky":
            return cholesky_inverse
        start = block.inverse.get(key, (None,))[0]

        def invert(matrix: Tensor, damping: float) -> tuple[Tensor, ...]:
            warm = None if start is None else start.to(matrix.dtype)
            return newton_schulz_inverse(matrix, damping, warm)

        return invert

    def _agree(
        self,
        block: KroneckerBlock,
        row: list[float],
        step: int,
        damping: float,
        batch_ratio: float,
        *,
        again: bool,
    ) -> list[tuple[KroneckerBlock, str]]:
        """Let a layer's owner's findings become everyone's state; which inverses are new."""
        policy = self._rules.policy
        failed = row[4] > 0.0
        new = [key for key, done in zip(_KEYS, row[2:4], strict=True) if done > 0.0]
        for key, code in zip(_KEYS, row[:2], strict=True):
            part = block.parts[key]
            if 0.0 < code < _REJECTED:
                part.state = policy.after(
                    part.state, step, **_similarity(code), batch_ratio=batch_ratio
                )
                if failed:
                    part.state = replace(part.state, due=step + 1)
        block.inverted.update(new)
        if len(new) == 2:
            block.inverse_damping = damping
            if policy.inverse_interval is not None:
                block.inverse_due = step + in_steps(policy.inverse_interval, batch_ratio)
        if failed:
            block.failures += 1
            self._warn_once(block)
        elif new or any(0.0 < code < _REJECTED for code in row[:2]):
            block.failures = 0
        return [(block, key) for key in new]

    def _spread_inverses(self, sent: list[tuple[KroneckerBlock, str]]) -> None:
        """From the owners to the gradient workers of their layers."""
        if self._column.world_size == 1:
            return
        eigen = self._rules.method == "eigen"
        for source, rank in enumerate(self._column_ranks):
            parts = [
                (block, key) for block, key in sent if self.placements[block.name].owner == rank
            ]
            for block, key in parts:
                side = block.parts[key].side
                length = side + side * side if eigen else packed_length(side)
                flat = torch.empty(length, dtype=block.dtype, device=block.layer.weight.device)
                if self._owns(block):
                    flat.copy_(_flat_inverse(block.inverse[key]))
                self._column.broadcast(flat, source)
                if not self._owns(block):
                    block.inverse[key] = _inverse_of(flat, side, eigen=eigen)

    def _check_failures(self, touched: list[KroneckerBlock]) -> None:
        for block in touched:
            if block.failures > self._rules.tolerated_failures:
                raise RunFailedError(
                    f"optimizer: the factors of layer `{block.name}` could not be inverted "
                    f"{block.failures} times in a row. Raise optimizer.damping, lower "
                    "optimizer.lr, or raise optimizer.tolerated_failures."
                )

    def _warn_once(self, block: KroneckerBlock) -> None:
        if block.name in self._warned or self._exchange.rank != 0:
            return
        self._warned.add(block.name)
        fallback = "its last good inverse" if block.ready else "the plain gradient"
        self._warn(
            f"the factors of layer `{block.name}` are singular or not finite: it uses {fallback} "
            "until they can be inverted again. More damping helps."
        )

    # --- applying -----------------------------------------------------------------------------

    def _solve(self, block: KroneckerBlock, damping: float) -> Tensor:
        matrix = _gradient_matrix(block)
        solved = kronecker_solve(matrix, block.inverse["inputs"], block.inverse["outputs"], damping)
        # Decided on the device: asking it for the answer would cost a synchronisation per layer.
        return torch.where(solved.isfinite().all(), solved, matrix)

    def _swap(self, active: list[KroneckerBlock], mine: dict[str, Tensor]) -> dict[str, Tensor]:
        """Everyone in this worker's row gets all layers; zeros where another one computes."""
        found: dict[str, Tensor] = {}
        for dtype in dict.fromkeys(block.dtype for block in active):
            blocks = [block for block in active if block.dtype is dtype]
            sizes = [block.inputs.side * block.outputs.side for block in blocks]
            device = blocks[0].layer.weight.device
            flat = torch.zeros(sum(sizes), dtype=dtype, device=device)
            pieces = flat.split(sizes)
            for block, piece in zip(blocks, pieces, strict=True):
                if block.name in mine:
                    piece.copy_(mine[block.name].reshape(-1))
            self._row.all_reduce(flat)
            for block, piece in zip(blocks, pieces, strict=True):
                found[block.name] = piece.view(block.outputs.side, block.inputs.side)
        return found

    # --- state --------------------------------------------------------------------------------

    @property
    def num_bytes(self) -> int:
        """Bytes of factors and inverses that this worker keeps between steps."""
        kept = [t for p in self._statistics() for t in (p.value, p.older) if t is not None]
        kept += [t for b in self._kronecker for inverse in b.inverse.values() for t in inverse]
        return sum(tensor.nbytes for tensor in kept)

    def state(self) -> dict[str, Any]:
        """Everything, by layer name, on every worker. All workers call it together."""
        layers = {block.name: self._block_state(block) for block in self.blocks}
        return {"credit": self._credit, "layers": layers}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Continue from `state`, under today's placement.

        Raises:
            CheckpointError: For other layers.
        """
        names = {block.name for block in self.blocks}
        layers = saved["layers"]
        if set(layers) != names:
            odd = sorted(set(layers) ^ names)[:3]
            raise CheckpointError(
                f"checkpoint: its curvature is for other layers ({', '.join(odd)}). Resume with "
                "the model and frozen parameters it was saved with."
            )
        for block in self.blocks:
            self._load_block(block, layers[block.name])
        self._credit = float(saved["credit"])

    def _block_state(self, block: KroneckerBlock | UnitBlock) -> dict[str, Any]:
        state: dict[str, Any] = {"parts": {}}
        for key, part in block.parts.items():
            entry: dict[str, Any] = {"state": list(astuple(part.state)), "cost": part.cost}
            if part.state.count > 0:
                entry["value"] = self._owned(block, part, part.value)
            if part.state.count > 1 and self._rules.policy.keeps_older:
                entry["older"] = self._owned(block, part, part.older)
            state["parts"][key] = entry
        if isinstance(block, KroneckerBlock):
            eigen = self._rules.method == "eigen"
            state["inverse"] = {}
            for key in sorted(block.inverted):
                side = block.parts[key].side
                flat = self._from_owner(
                    block,
                    _flat_inverse(block.inverse[key]) if self._owns(block) else None,
                    side + side * side if eigen else packed_length(side),
                )
                state["inverse"][key] = flat
            state["method"] = self._rules.method
            state["pass_cost"] = block.pass_cost
            state["inverse_due"] = block.inverse_due
            state["inverse_damping"] = block.inverse_damping
            state["failures"] = block.failures
        return state

    def _load_block(self, block: KroneckerBlock | UnitBlock, saved: Mapping[str, Any]) -> None:
        device = block.layer.weight.device
        for key, part in block.parts.items():
            entry = saved["parts"][key]
            part.state, part.cost = RefreshState(*entry["state"]), float(entry["cost"])
            for name in ("value", "older"):
                kept = None
                if name in entry and self._keeps(part):
                    kept = entry[name].to(device, block.dtype, copy=True)
                    kept = unpack(kept) if part.side else kept
                setattr(part, name, kept)
        if isinstance(block, KroneckerBlock):
            block.inverse, block.inverted, block.inverse_due = {}, set(), 0
            if saved["method"] == self._rules.method:
                block.inverted = set(saved["inverse"])
                block.inverse_due = int(saved["inverse_due"])
                block.inverse_damping = float(saved["inverse_damping"])
                for key in block.inverted:
                    if self._exchange.rank in self.placements[block.name].workers:
                        flat = saved["inverse"][key].to(device, block.dtype, copy=True)
                        block.inverse[key] = _inverse_of(
                            flat, block.parts[key].side, eigen=self._rules.method == "eigen"
                        )
            block.pass_cost = float(saved["pass_cost"])
            block.failures = int(saved["failures"])

    def _owned(
        self, block: KroneckerBlock | UnitBlock, part: Statistic, tensor: Tensor | None
    ) -> Tensor:
        if not isinstance(block, KroneckerBlock):
            assert tensor is not None
            return tensor.clone()
        packed = pack(tensor) if tensor is not None else None
        return self._from_owner(block, packed, packed_length(part.side))

    def _from_owner(self, block: KroneckerBlock, tensor: Tensor | None, length: int) -> Tensor:
        if tensor is None:
            tensor = torch.empty(length, dtype=block.dtype, device=block.layer.weight.device)
        if self._exchange.world_size > 1:
            self._exchange.broadcast(tensor, self.placements[block.name].owner)
        return tensor

    # --- who ----------------------------------------------------------------------------------

    def _statistics(self) -> Iterator[Statistic]:
        for block in self.blocks:
            yield from block.parts.values()

    def _cost(self, part: Statistic) -> float:
        """Of collecting a statistic, and of inverting it where that comes with it."""
        follows = self._rules.policy.inverse_interval is None
        return part.cost + (float(part.side) ** 3 if follows else 0.0)

    def _owns(self, block: KroneckerBlock) -> bool:
        return self.placements[block.name].owner == self._exchange.rank

    def _keeps(self, part: Statistic) -> bool:
        """This worker keeps the factor; those of norm layers are small and kept everywhere."""
        placement = self.placements.get(part.name.rpartition(".")[0]) if part.side else None
        return placement is None or placement.owner == self._exchange.rank


def _similarity(code: float) -> dict[str, bool]:
    bits = int(code) - 1
    return {"to_last": bool(bits & 1), "to_older": bool(bits & 2)}


def _has_gradient(block: KroneckerBlock) -> bool:
    layer = block.layer
    return layer.weight.grad is not None and (layer.bias is None or layer.bias.grad is not None)


def _gradient_matrix(block: KroneckerBlock) -> Tensor:
    weight, bias = block.layer.weight.grad, block.layer.bias
    assert weight is not None
    return layer_matrix(weight, None if bias is None else bias.grad, block.dtype)


def _flat_inverse(inverse: tuple[Tensor, ...]) -> Tensor:
    if len(inverse) == 1:
        return pack(inverse[0])
    return torch.cat([inverse[0], inverse[1].reshape(-1)])


def _inverse_of(flat: Tensor, side: int, *, eigen: bool) -> tuple[Tensor, ...]:
    if not eigen:
        return (unpack(flat),)
    return flat[:side].clone(), flat[side:].reshape(side, side).clone()
