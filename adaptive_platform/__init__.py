"""Adaptive Platform: elastic, adaptive-batch training on Ray.

Three doors: `train(recipe)` does everything from a recipe, `AdaptiveTrainer` takes your model and
data, `Run` lives inside your own Ray Train loop. They are imported when first used, so that
importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adaptive_platform.cluster.own_loop import Run
    from adaptive_platform.cluster.trainer import AdaptiveTrainer, train
    from adaptive_platform.errors import UserError
    from adaptive_platform.recipe import Recipe, load_recipe

__all__ = ["AdaptiveTrainer", "Recipe", "Run", "UserError", "load_recipe", "train"]

_HOMES = {
    "AdaptiveTrainer": "adaptive_platform.cluster.trainer",
    "Recipe": "adaptive_platform.recipe",
    "Run": "adaptive_platform.cluster.own_loop",
    "UserError": "adaptive_platform.errors",
    "load_recipe": "adaptive_platform.recipe",
    "train": "adaptive_platform.cluster.trainer",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'adaptive_platform' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
