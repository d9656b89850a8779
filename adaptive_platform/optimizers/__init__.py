"""First- and second-order optimizers, built from named parameters, and learning-rate schedules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from adaptive_platform.optimizers.config import OptimizerConfig
from adaptive_platform.optimizers.exchange import Exchange
from adaptive_platform.optimizers.groups import (
    describe_groups,
    set_lr,
    set_momentum,
    set_progress,
    set_weight_decay,
)
from adaptive_platform.optimizers.named_state import load_named_state, named_state
from adaptive_platform.optimizers.natural.driven import ListeningOptimizer
from adaptive_platform.optimizers.preconditioning import AdamPreconditioner
from adaptive_platform.optimizers.schedules import ScheduleConfig
from adaptive_platform.optimizers.weight_averaging import WeightAveragingConfig
from adaptive_platform.settings import import_variants, union_of

__all__ = [
    "AdamPreconditioner",
    "AnyOptimizer",
    "AnySchedule",
    "Exchange",
    "ListeningOptimizer",
    "OptimizerConfig",
    "ScheduleConfig",
    "WeightAveragingConfig",
    "describe_groups",
    "load_named_state",
    "named_state",
    "set_lr",
    "set_momentum",
    "set_progress",
    "set_weight_decay",
]

if TYPE_CHECKING:
    AnyOptimizer = OptimizerConfig
    AnySchedule = ScheduleConfig
else:
    import_variants(__name__)
    AnyOptimizer = union_of(OptimizerConfig)
    AnySchedule = union_of(ScheduleConfig)
