"""Reductions: plans as data, process groups that can be rebuilt, executors.

`ReducerConfig.plan` says what will be done, `Reducer` does it, `simulate` and `cost` study it
without a process. Assumed, and not checked: all workers of a generation make the same calls in the
same order with buffers of equal length; the store outlives them; they trust each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from adaptive_platform.collectives.auto import AutoConfig
from adaptive_platform.collectives.calibrate import (
    Timing,
    fit_link,
    measure_links,
    time_reductions,
)
from adaptive_platform.collectives.cost import Link, Links, cheapest, cost, exposed_seconds
from adaptive_platform.collectives.failure import CollectiveError
from adaptive_platform.collectives.groups import Membership, ProcessGroups
from adaptive_platform.collectives.halving_doubling import HalvingDoublingConfig
from adaptive_platform.collectives.hierarchical import HierarchicalConfig
from adaptive_platform.collectives.hybrid import HybridConfig
from adaptive_platform.collectives.ordered import Pending
from adaptive_platform.collectives.parameter_server import ParameterServerConfig
from adaptive_platform.collectives.plan import Phase, Plan, ReducerConfig
from adaptive_platform.collectives.reducer import Reducer
from adaptive_platform.collectives.ring import RingConfig
from adaptive_platform.collectives.simulate import Simulation, simulate
from adaptive_platform.collectives.torus import TorusConfig
from adaptive_platform.collectives.tree import TreeConfig
from adaptive_platform.settings import import_variants, union_of

__all__ = [
    "AnyReducer",
    "AutoConfig",
    "CollectiveError",
    "HalvingDoublingConfig",
    "HierarchicalConfig",
    "HybridConfig",
    "Link",
    "Links",
    "Membership",
    "ParameterServerConfig",
    "Pending",
    "Phase",
    "Plan",
    "ProcessGroups",
    "Reducer",
    "ReducerConfig",
    "RingConfig",
    "Simulation",
    "Timing",
    "TorusConfig",
    "TreeConfig",
    "cheapest",
    "cost",
    "exposed_seconds",
    "fit_link",
    "measure_links",
    "simulate",
    "time_reductions",
]

import_variants(__name__)

if TYPE_CHECKING:
    AnyReducer = ReducerConfig
else:
    AnyReducer = union_of(ReducerConfig)
