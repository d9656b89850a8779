"""Batch controllers and learning-rate rules: summaries and limits in, decisions out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from adaptive_platform.controllers.controller import (
    Candidate,
    Controller,
    ControllerConfig,
    Decision,
    Limits,
    Need,
    Observation,
)
from adaptive_platform.controllers.lr_rules import LrRuleConfig
from adaptive_platform.controllers.momentum_rules import MomentumContext, MomentumRuleConfig
from adaptive_platform.settings import import_variants, union_of

__all__ = [
    "AnyController",
    "AnyLrRule",
    "AnyMomentumRule",
    "Candidate",
    "Controller",
    "ControllerConfig",
    "Decision",
    "Limits",
    "LrRuleConfig",
    "MomentumContext",
    "MomentumRuleConfig",
    "Need",
    "Observation",
]

import_variants(__name__)

if TYPE_CHECKING:
    AnyController = ControllerConfig
    AnyLrRule = LrRuleConfig
    AnyMomentumRule = MomentumRuleConfig
else:
    AnyController = union_of(ControllerConfig)
    """Any batch controller's configuration, told apart by `kind`."""
    AnyLrRule = union_of(LrRuleConfig)
    """Any learning-rate rule, told apart by `kind`."""
    AnyMomentumRule = union_of(MomentumRuleConfig)
    """Any momentum rule, told apart by `kind`."""
