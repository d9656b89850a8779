"""The torus over several machines, or on measured links the cheapest plan for each message size."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, field_validator

from adaptive_platform.collectives.cost import Links, cheapest
from adaptive_platform.collectives.halving_doubling import HalvingDoublingConfig
from adaptive_platform.collectives.hierarchical import HierarchicalConfig
from adaptive_platform.collectives.plan import MessagesConfig, Plan, PlanTable, ReducerConfig
from adaptive_platform.collectives.ring import RingConfig
from adaptive_platform.collectives.torus import TorusConfig
from adaptive_platform.collectives.tree import TreeConfig

__all__ = ["AutoConfig"]

Candidate = Literal["torus", "ring", "halving_doubling", "hierarchical", "tree"]

_KINDS: dict[Candidate, Callable[[], ReducerConfig]] = {
    "torus": TorusConfig,
    "ring": RingConfig,
    "halving_doubling": HalvingDoublingConfig,
    "hierarchical": HierarchicalConfig,
    "tree": TreeConfig,
}
_SIZES = tuple(float(2**power) for power in range(10, 31))
"""Message sizes at which plans are compared: 1 KiB to 1 GiB."""


class AutoConfig(MessagesConfig):
    """The default. Same inputs, so the same choice on all workers.

    Without measured links: the torus where the workers are on more than one machine, and the
    backend's own all-reduce on one, where nothing is far away. With them: for each message size the
    plan that the cost model finds cheapest.
    """

    kind: Literal["auto"] = "auto"
    links: Links | None = None
    """Latency and bandwidth between machines and inside one, as measured. A path names the file
    that `adaptive-platform bench collectives --out FILE` wrote, with `--address` on the workers of
    a cluster; it is read once and its numbers become part of the recipe. Nothing: not measured."""
    candidates: tuple[Candidate, ...] = Field(
        ("torus", "ring", "halving_doubling", "hierarchical", "tree"), min_length=1
    )
    """Plans to choose from on measured links, with their default settings; the earlier wins among
    equals."""

    @field_validator("links", mode="before")
    @classmethod
    def _from_file(cls, links: Any) -> Any:
        if not isinstance(links, str):
            return links
        try:
            return yaml.safe_load(Path(links).read_text())
        except (OSError, yaml.YAMLError) as error:
            raise ValueError(f"{links} is not a readable YAML file: {error}") from None

    def plans(self, world_size: int, node_of_rank: Sequence[str] | None = None) -> PlanTable:
        """The cheapest plan up to each limit; neighbours with the same plan are merged."""
        if self.links is None:
            several = len(set(node_of_rank or ())) > 1
            rule = TorusConfig() if several else RingConfig()
            return ((math.inf, rule.plan(world_size, node_of_rank)),)
        plans: dict[str, Plan] = {
            name: _KINDS[name]().plan(world_size, node_of_rank) for name in self.candidates
        }
        choices = [(size, cheapest(plans, size, self.links, node_of_rank)) for size in _SIZES]
        runs = [(name, list(run)) for name, run in groupby(choices, key=lambda choice: choice[1])]
        limits = [run[-1][0] for _, run in runs[:-1]] + [math.inf]
        return tuple((limit, plans[name]) for limit, (name, _) in zip(limits, runs, strict=True))

    def plan(self, world_size: int, node_of_rank: Sequence[str] | None = None) -> Plan:
        """The plan of the largest messages."""
        return self.plans(world_size, node_of_rank)[-1][1]
