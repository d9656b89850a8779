"""What each reduction plan would cost on a cluster of any size, from its links alone."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from adaptive_platform.bench.model_profile import Bucket
from adaptive_platform.collectives import (
    AutoConfig,
    Link,
    Links,
    Plan,
    ReducerConfig,
    TorusConfig,
    cost,
    exposed_seconds,
)
from adaptive_platform.errors import UserError
from adaptive_platform.settings import user_error, variants_of

__all__ = ["PlanRow", "Step", "make_links", "price_plans", "print_plans", "read_grid", "read_links"]

_COMPOSED = ("auto", "hybrid")
_ONLY_ROUNDS = Links(remote=Link(latency_seconds=1.0, bytes_per_second=1e300))
_ONLY_BYTES = Links(remote=Link(latency_seconds=0.0, bytes_per_second=1.0))
_BACKWARD = 2 / 3
"""Part of a step's computation that is backward: two of three matrix products per layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The computation that a reduction can hide behind."""

    compute_seconds: float
    """Forward and backward of one step on one worker, without communication."""
    bucket_bytes: float
    """Gradients are reduced in buckets of this size, ready at even distances in backward."""
    buckets: tuple[Bucket, ...] = ()
    """The buckets of a model that is known; `bucket_bytes` then plays no part."""
    samples_to_go: float | None = None
    """Samples of the whole training, for the time that it takes."""
    samples_per_worker: int = 1
    """Samples of one worker and step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """One plan."""

    workers: int
    plan: str
    grid: tuple[int, int]
    """Rows and row length of a torus; (1, workers) otherwise."""
    steps: int
    """Messages one after the other; each costs a latency."""
    bytes: float
    """Bytes that cross the busiest worker's link, summed over the steps."""
    seconds: float
    """One reduction of the whole message."""
    exposed_seconds: float | None
    """What of it backward does not hide, where a `Step` was given."""
    efficiency: float | None
    """Computation / (computation + exposed reduction)."""
    step_seconds: float | None
    """Computation and exposed reduction of one step."""
    training_seconds: float | None
    """Of all steps, where the step says how many samples there are to go."""


def price_plans(
    workers: int,
    links: Links,
    message_bytes: float,
    *,
    workers_per_node: int = 1,
    grid: tuple[int, int] | None = None,
    step: Step | None = None,
    kinds: Sequence[str] = (),
) -> list[PlanRow]:
    """Price every plan, cheapest first.

    Args:
        workers: Number of workers; tens of thousands are fine.
        links: Speeds.
        message_bytes: Bytes of one worker's gradients.
        workers_per_node: Neighbouring ranks on one machine, which share its network card.
        grid: Rows and row length of the torus; left out, one row per machine or the squarest.
        step: What the reduction overlaps with.
        kinds: Plans to price; all where none are named.

    Raises:
        UserError: The grid does not hold the workers, or the machines do not.
    """
    if workers < 2:
        raise UserError(f"--workers = {workers}: must be at least 2, or there is nothing to plan.")
    if workers_per_node < 1 or workers % workers_per_node:
        raise UserError(
            f"--workers-per-node = {workers_per_node}: must divide the {workers} workers."
        )
    nodes = None
    if workers_per_node > 1:
        nodes = [str(rank // workers_per_node) for rank in range(workers)]
    plans = {
        kind: variant(kind=kind).plan(workers, nodes)
        for kind, variant in variants_of(ReducerConfig).items()
        if kind not in _COMPOSED and kind != "torus" and (not kinds or kind in kinds)
    }
    if not kinds or "torus" in kinds:
        plans["torus"] = TorusConfig(grid=grid).plan(workers, nodes)
    rows = [_row(plan, links, message_bytes, nodes, step) for plan in plans.values()]
    return sorted(rows, key=lambda row: row.seconds)


def print_plans(rows: Sequence[PlanRow], *, as_json: bool, console: Console) -> None:
    """Print all rows, one JSON object a line or as a table."""
    if as_json:
        for row in rows:
            print(json.dumps(asdict(row)))
        return
    several = len({row.workers for row in rows}) > 1
    table = Table(*(["workers"] if several else []), "plan", "grid", "steps", box=None)
    table.caption = "MB: over the busiest link; seconds: one reduction of everything"
    for title in ("MB", "seconds"):
        table.add_column(title)
    with_step = rows[0].efficiency is not None
    if with_step:
        for title in ("exposed s", "step s", "efficiency"):
            table.add_column(title)
    with_training = rows[0].training_seconds is not None
    if with_training:
        table.add_column("training")
    for row in rows:
        grid = f"{row.grid[0]} x {row.grid[1]}" if row.grid[0] > 1 else ""
        cells = [f"{row.workers:,}"] if several else []
        cells += [row.plan, grid, str(row.steps), f"{row.bytes / 1e6:.1f}", f"{row.seconds:.4g}"]
        if with_step:
            cells += [
                f"{row.exposed_seconds:.4g}",
                f"{row.step_seconds:.4g}",
                f"{row.efficiency:.1%}",
            ]
        if row.training_seconds is not None:
            cells.append(_duration(row.training_seconds))
        table.add_row(*cells)
    console.print(table)


def _duration(seconds: float) -> str:
    if seconds < 600:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 36_000 else f"{seconds / 3600:.1f} h"


def make_links(alpha: float, beta: float, local_alpha: float, local_beta: float) -> Links:
    """Links from latencies in seconds and inverse bandwidths in seconds per byte.

    Raises:
        UserError: A bandwidth is not positive or a latency negative.
    """
    for name, value in {"--beta": beta, "--local-beta": local_beta}.items():
        if not value > 0:
            raise UserError(f"{name} = {value:g}: must be above 0 seconds per byte.")
    for name, value in {"--alpha": alpha, "--local-alpha": local_alpha}.items():
        if not value >= 0:
            raise UserError(f"{name} = {value:g}: must be at least 0 seconds.")
    return Links(
        remote=Link(latency_seconds=alpha, bytes_per_second=1 / beta),
        local=Link(latency_seconds=local_alpha, bytes_per_second=1 / local_beta),
    )


def read_links(path: str) -> Links:
    """The links in a file that `bench collectives --out` wrote.

    Raises:
        UserError: The file is not readable or does not hold links.
    """
    try:
        links = AutoConfig.model_validate({"links": path}).links
    except ValidationError as error:
        raise user_error(error, AutoConfig) from None
    assert links is not None
    return links


def read_grid(words: str) -> tuple[int, int]:
    """Rows and row length from `32x64`.

    Raises:
        UserError: It does not have that form.
    """
    parts = words.lower().split("x")
    if len(parts) != 2 or not all(part.strip().isdigit() for part in parts):
        raise UserError(f"--grid = {words}: write rows x row length, such as 32x64.")
    return int(parts[0]), int(parts[1])


def _row(
    plan: Plan,
    links: Links,
    message_bytes: float,
    nodes: Sequence[str] | None,
    step: Step | None,
) -> PlanRow:
    exposed = efficiency = step_seconds = training_seconds = None
    if step is not None:
        exposed = _exposed(plan, links, message_bytes, nodes, step)
        step_seconds = step.compute_seconds + exposed
        efficiency = step.compute_seconds / step_seconds
        if step.samples_to_go is not None:
            per_step = plan.world_size * step.samples_per_worker
            training_seconds = math.ceil(step.samples_to_go / per_step) * step_seconds
    return PlanRow(
        workers=plan.world_size,
        plan=plan.name,
        grid=plan.grid,
        steps=round(cost(plan, 1.0, _ONLY_ROUNDS)),
        bytes=cost(plan, message_bytes, _ONLY_BYTES),
        seconds=cost(plan, message_bytes, links, nodes),
        exposed_seconds=exposed,
        efficiency=efficiency,
        step_seconds=step_seconds,
        training_seconds=training_seconds,
    )


def _exposed(
    plan: Plan, links: Links, message_bytes: float, nodes: Sequence[str] | None, step: Step
) -> float:
    backward = _BACKWARD * step.compute_seconds
    buckets = step.buckets
    if not buckets:
        count = max(1, round(message_bytes / step.bucket_bytes))
        buckets = tuple(Bucket(message_bytes / count, (i + 1) / count) for i in range(count))
    seconds = {size: cost(plan, size, links, nodes) for size in {b.bytes for b in buckets}}
    return exposed_seconds(
        [backward * bucket.ready for bucket in buckets],
        [seconds[bucket.bytes] for bucket in buckets],
        backward,
    )
