"""A run's configuration: what it is made of, what goes together, and where it is read from."""

from adaptive_platform.recipe.loading import (
    load_recipe,
    published_recipes,
    read_mapping,
    shipped_recipes,
)
from adaptive_platform.recipe.model import MembershipConfig, Recipe, ReportConfig, StopConfig
from adaptive_platform.recipe.overrides import apply_overrides, parse_overrides

__all__ = [
    "MembershipConfig",
    "Recipe",
    "ReportConfig",
    "StopConfig",
    "apply_overrides",
    "load_recipe",
    "parse_overrides",
    "published_recipes",
    "read_mapping",
    "shipped_recipes",
]
