"""A layer's curvature in a checkpoint: gathered from its owner, loaded under today's placement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any

from torch import Tensor

from adaptive_platform.errors import CheckpointError
from adaptive_platform.optimizers.natural.blocks import KroneckerBlock, Statistic, UnitBlock
from adaptive_platform.optimizers.natural.factor_forms import reordered
from adaptive_platform.optimizers.natural.inverse_shapes import (
    flat_inverse,
    flat_length,
    inverse_of,
)
from adaptive_platform.optimizers.natural.inverses import InverseMethod, reordered_inverse
from adaptive_platform.optimizers.natural.packing import pack, packed_length, unpack
from adaptive_platform.optimizers.natural.refresh import RefreshState
from adaptive_platform.optimizers.natural.workers import Workers

__all__ = ["load_layers", "saved_layers"]

Block = KroneckerBlock | UnitBlock


def saved_layers(
    blocks: Sequence[Block], workers: Workers, method: InverseMethod, *, keeps_older: bool
) -> dict[str, dict[str, Any]]:
    """Everything by layer name, on every worker. All workers call it together.

    Args:
        blocks: All layers.
        workers: Who keeps what.
        method: How inverses were made.
        keeps_older: The value before the last one is kept, too.
    """
    return {
        block.name: _saved_layer(block, workers, method, keeps_older=keeps_older)
        if isinstance(block, KroneckerBlock)
        else {"parts": {key: _saved_unit(part) for key, part in block.parts.items()}}
        for block in blocks
    }


def load_layers(
    blocks: Sequence[Block],
    saved: Mapping[str, Mapping[str, Any]],
    workers: Workers,
    method: InverseMethod,
) -> None:
    """Continue from `saved_layers`; inverses of another method are made anew.

    Raises:
        CheckpointError: For other layers.
    """
    if set(saved) != {block.name for block in blocks}:
        odd = sorted(set(saved) ^ {block.name for block in blocks})[:3]
        raise CheckpointError(
            f"checkpoint: its curvature is for other layers ({', '.join(odd)}). Resume with "
            "the model and frozen parameters it was saved with."
        )
    kronecker = [block for block in blocks if isinstance(block, KroneckerBlock)]
    for block in kronecker:
        _load_sizes(block, saved[block.name])
    if any(block.taps for block in kronecker):
        workers.place(kronecker)
    for each in blocks:
        for key, part in each.parts.items():
            _load_part(each, part, saved[each.name]["parts"][key], workers)
    for block in kronecker:
        block.use_own_form()
        _load_inverses(block, saved[block.name], workers, method)


def _saved_layer(
    block: KroneckerBlock, workers: Workers, method: InverseMethod, *, keeps_older: bool
) -> dict[str, Any]:
    parts = {}
    for key, part in block.parts.items():
        entry = _numbers(part)
        if part.state.count > 0:
            entry["value"] = _from_owner(block, key, part.value, part.rows, workers)
        if part.state.count > 1 and keeps_older:
            entry["older"] = _from_owner(block, key, part.older, part.older_rows, workers)
        parts[key] = entry
    inverses = {}
    for key, rows in sorted(block.inverted.items()):
        own = None
        if workers.owns(block):
            order = block.order(saving=True) if key == "inputs" else None
            own = flat_inverse(reordered_inverse(block.inverse[key], order))
        length = flat_length(method, block.parts[key].side, rows)
        inverses[key] = workers.from_owner(block, own, length)
    return {
        "parts": parts,
        "taps": list(block.taps),
        "inverse": inverses,
        "inverse_rows": dict(block.inverted),
        "method": method,
        "pass_cost": block.pass_cost,
        "inverse_due": block.inverse_due,
        "inverse_damping": block.inverse_damping,
        "failures": block.failures,
    }


def _saved_unit(part: Statistic) -> dict[str, Any]:
    entry = _numbers(part)
    for name in ("value", "older"):
        kept = getattr(part, name)
        if kept is not None:
            entry[name] = kept.clone()
    return entry


def _numbers(part: Statistic) -> dict[str, Any]:
    return {
        "state": list(astuple(part.state)),
        "cost": part.cost,
        "rows": part.rows,
        "older_rows": part.older_rows,
    }


def _from_owner(
    block: KroneckerBlock, key: str, tensor: Tensor | None, rows: int, workers: Workers
) -> Tensor:
    flat, side = None, block.parts[key].side
    if tensor is not None:
        order = block.order(saving=True) if key == "inputs" else None
        tensor = tensor if order is None else reordered(tensor, order)
        flat = tensor.reshape(-1).clone() if rows else pack(tensor)
    return workers.from_owner(block, flat, rows * side or packed_length(side))


def _load_sizes(block: KroneckerBlock, saved: Mapping[str, Any]) -> None:
    block.restore_taps(tuple(int(tap) for tap in saved["taps"]))
    for key, part in block.parts.items():
        entry = saved["parts"][key]
        part.rows, part.older_rows = int(entry["rows"]), int(entry["older_rows"])


def _load_part(block: Block, part: Statistic, saved: Mapping[str, Any], workers: Workers) -> None:
    part.state, part.cost = RefreshState(*saved["state"]), float(saved["cost"])
    for name, rows in (("value", part.rows), ("older", part.older_rows)):
        kept = None
        if name in saved and workers.keeps(part):
            kept = saved[name].to(block.layer.weight.device, block.dtype, copy=True)
            if part.side:
                kept = kept.view(rows, part.side) if rows else unpack(kept)
                order = _loading_order(block, part)
                kept = kept if order is None else reordered(kept, order)
        setattr(part, name, kept)


def _load_inverses(
    block: KroneckerBlock, saved: Mapping[str, Any], workers: Workers, method: InverseMethod
) -> None:
    block.inverse, block.inverted, block.inverse_due = {}, {}, 0
    block.pass_cost = float(saved["pass_cost"])
    block.failures = int(saved["failures"])
    if saved["method"] != method:
        return
    block.inverted = {key: int(rows) for key, rows in saved["inverse_rows"].items()}
    block.inverse_due = int(saved["inverse_due"])
    block.inverse_damping = float(saved["inverse_damping"])
    for key, rows in block.inverted.items():
        if workers.applies(block):
            flat = saved["inverse"][key].to(block.layer.weight.device, block.dtype, copy=True)
            part = block.parts[key]
            found = inverse_of(flat, method, part.side, rows)
            block.inverse[key] = reordered_inverse(found, _loading_order(block, part))


def _loading_order(block: Block, part: Statistic) -> Tensor | None:
    if isinstance(block, KroneckerBlock) and part is block.inputs:
        return block.order(saving=False)
    return None
