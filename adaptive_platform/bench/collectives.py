"""Every reduction plan against Gloo's own all-reduce, and the links that the workers have."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch._C._distributed_c10d import PrefixStore

from adaptive_platform.bench.processes import run_group
from adaptive_platform.bench.rows import Row, paired
from adaptive_platform.collectives import (
    Links,
    Membership,
    Reducer,
    ReducerConfig,
    measure_links,
)
from adaptive_platform.errors import UserError
from adaptive_platform.settings import variants_of

__all__ = ["SIZES", "collectives", "read_sizes", "write_links"]

_COMPOSED = ("auto", "hybrid")
"""Kinds that only choose among the others."""
_BATCH_BYTES = 2**21
"""Small messages are sent repeatedly until this much has been, as one timing."""
_MOST_REPEATS = 16
_FEW_WORKERS = 4
"""More take their time, as the processor is theirs in turn, so they repeat less."""
SIZES = {"64 KB": 64_000, "1 MB": 1_000_000, "25 MB": 25_000_000, "100 MB": 100_000_000}
_FACTORS = {"": 1, "K": 1_000, "M": 1_000_000, "G": 1_000_000_000}
_GENERATION_OF_LINKS = 1000


_CROWDS = (16, 64)
"""Group sizes that are timed with one short message only: the number of steps is what shows."""


def collectives(
    *,
    quick: bool,
    out: str = "",
    workers: Sequence[int] = (),
    sizes: Mapping[str, int] | None = None,
    plans: Sequence[str] = (),
    address: str = "",
) -> list[Row]:
    """Alternate Gloo's own all-reduce and each plan, on local processes of one thread.

    Every block times each plan once, and each plan's pair is the raw all-reduce right before it.
    A time is that of the slowest worker. With more processes than cores the figures show the work
    done per byte and per message rather than the network; their ratio is still fair.

    Args:
        quick: 2 and 4 workers, up to 25 MB and few blocks, to end within a minute.
        out: File for the measured links, which `reducer: {kind: auto, links: FILE}` reads.
        workers: Group sizes other than 2, 4 and 8 with all sizes, 16 and 64 with 64 KB.
        sizes: Message sizes in bytes by their name, other than those.
        plans: Kinds of plans, other than all of them (torus and ring for 16 and 64 workers).
        address: Of a Ray cluster whose workers' links are measured instead of anything here.

    Raises:
        UserError: A plan that there is not, or that only chooses among others.
    """
    if address:
        from adaptive_platform.bench.cluster_links import cluster_links

        count = workers[0] if workers else 2
        links = cluster_links(address, count)
        if out:
            write_links(links, out)
        return _link_rows(count, links)
    blocks = 3 if quick else 9
    kinds = tuple(kind for kind in variants_of(ReducerConfig) if kind not in _COMPOSED)
    unknown = [plan for plan in plans if plan not in kinds]
    if unknown:
        raise UserError(f"--plan = {unknown[0]}: must be one of {', '.join(kinds)}.")
    all_sizes = sizes or dict(list(SIZES.items())[: 3 if quick else 4])
    short = sizes or dict(list(SIZES.items())[:1])
    cases = [
        (count, all_sizes, plans or kinds) for count in workers or ((2, 4) if quick else (2, 4, 8))
    ]
    if not quick and not workers:
        cases += [(count, short, plans or ("torus", "ring")) for count in _CROWDS]
    rows: list[Row] = []
    measured: Links | None = None
    for world_size, chosen, kinds_here in cases:
        measures_links = chosen is all_sizes
        found = run_group(
            world_size,
            _time_blocks,
            kinds_here,
            list(chosen.values()),
            blocks,
            measures_links,
            fresh=False,
        )
        for label, size in chosen.items():
            for kind in kinds_here:
                ours, raw = (
                    [max(t) for t in zip(*(each[0][kind, size][i] for each in found), strict=True)]
                    for i in (0, 1)
                )
                case = f"{world_size} workers, {label}: {kind}"
                rows.append(paired("collectives", case, "s", ours, raw))
        if found[0][1] is not None:
            measured = found[0][1]
            rows += _link_rows(world_size, measured)
    if out and measured is not None:
        write_links(measured, out)
    return rows


def read_sizes(words: Sequence[str]) -> dict[str, int]:
    """Message sizes by their name, from words such as `64KB` and `25 MB`.

    Raises:
        UserError: A word does not have that form, or means no whole float32 number.
    """
    sizes = {}
    for word in words:
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)B", word.strip(), re.IGNORECASE)
        size = int(float(found[1]) * _FACTORS[found[2].upper()]) if found else 0
        if size < 4:
            raise UserError(f"--size = {word}: write a size of 4 bytes or more, such as 64KB.")
        sizes[f"{found[1]} {found[2].upper()}B" if found else word] = size
    return sizes


def write_links(links: Links, path: str) -> None:
    """Write links as the YAML that `AutoConfig.links` reads."""
    content = links.model_dump(mode="json", exclude_none=True)
    Path(path).write_text(yaml.safe_dump(content, sort_keys=False))


def _link_rows(world_size: int, links: Links) -> list[Row]:
    figures = {"latency (alpha)": (links.remote.latency_seconds, "s")}
    figures["bandwidth (1/beta)"] = (links.remote.bytes_per_second, "B/s")
    if links.local is not None:
        figures["local latency"] = (links.local.latency_seconds, "s")
        figures["local bandwidth"] = (links.local.bytes_per_second, "B/s")
    return [
        Row(
            bench="collectives",
            case=f"{world_size} workers: {name}",
            value=value,
            unit=unit,
            baseline=None,
            ratio=None,
            repeats=1,
        )
        for name, (value, unit) in figures.items()
    ]


Times = dict[tuple[str, int], tuple[list[float], list[float]]]
"""By plan and size: seconds of the plan and of the raw all-reduce before it, block by block."""


def _time_blocks(
    membership: Membership,
    kinds: Sequence[str],
    sizes: Sequence[int],
    blocks: int,
    measures_links: bool,
) -> tuple[Times, Links | None]:
    variants = variants_of(ReducerConfig)
    store, rank, world_size = membership.store, membership.rank, membership.world_size
    raw: Any = dist.ProcessGroupGloo(
        PrefixStore("raw", store), rank, world_size, timedelta(minutes=5)
    )
    reducers = {
        kind: Reducer(
            variants[kind](kind=kind, timeout_seconds=300.0),
            Membership(store, rank, world_size, generation),
        )
        for generation, kind in enumerate(kinds)
    }

    def timed(act: Callable[[], None], count: int) -> float:
        raw.barrier().wait()
        began = time.perf_counter()
        for _ in range(count):
            act()
        return (time.perf_counter() - began) / count

    times: Times = {(kind, size): ([], []) for kind in kinds for size in sizes}
    for size in sizes:
        buffer = torch.zeros(size // 4)
        most = max(1, _MOST_REPEATS * _FEW_WORKERS // max(_FEW_WORKERS, world_size))
        count = min(most, max(1, _BATCH_BYTES // size))
        for block in range(blocks + 1):  # the first one warms up
            for kind, reducer in reducers.items():
                bare = timed(lambda: raw.allreduce([buffer]).wait(), count)  # noqa: B023
                ours = timed(lambda: reducer.start(buffer).wait(), count)  # noqa: B023
                if block > 0:
                    times[kind, size][0].append(ours)
                    times[kind, size][1].append(bare)
    for reducer in reducers.values():
        reducer.close()
    if not measures_links:
        return times, None
    links = measure_links(
        Membership(store, rank, world_size, _GENERATION_OF_LINKS, membership.node_of_rank)
    )
    return times, links
