"""Refuses, before anything starts, what is no valid trial and what can't fit into the cluster."""

from __future__ import annotations

from typing import Any

import numpy as np
import ray

from adaptive_platform.errors import UserError
from adaptive_platform.recipe import Recipe
from adaptive_platform.sweeps.config import Sweep
from adaptive_platform.sweeps.progress import told
from adaptive_platform.sweeps.space import RandomChooser, draw

__all__ = ["checked_recipes", "fit", "lack", "workers_of"]

_PROBED = 20


def checked_recipes(sweep: Sweep, planned: list[dict[str, Any]] | None) -> list[Recipe]:
    """Every recipe that will run, or for a search that learns, a sample of them.

    Raises:
        UserError: One of them is not valid; nothing was started.
    """
    if planned is None:
        chooser = RandomChooser(np.random.default_rng(sweep.seed))
        planned = [draw(sweep.space, chooser) for _ in range(_PROBED)]
    recipes = []
    for fields in planned:
        try:
            recipes.append(sweep.recipe_of(fields))
        except UserError as error:
            raise UserError(
                f"{error} (drawn: {told(fields)}. Change the space, or use `when` to keep apart "
                "what does not go together.)"
            ) from None
    scheduler = sweep.scheduler
    if scheduler.kind == "pbt" and any(
        name.startswith("batch.") and recipe.batch.kind != "fixed"
        for name in getattr(scheduler, "moves", ())
        for recipe in recipes
    ):
        raise UserError(
            "scheduler.moves: batch.global_batch is where a controller begins and does not move "
            "a running trial; use batch.kind=fixed, or move other fields."
        )
    return recipes


def workers_of(recipe: Recipe) -> int:
    """Workers that a trial needs at most."""
    return max(recipe.workers) if isinstance(recipe.workers, tuple) else recipe.workers or 1


def _slots() -> int:
    """Workers that the nodes of the cluster have room for, one CPU (and one GPU) each."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    with_gpu = any(node.get("GPU", 0) >= 1 for node in nodes)
    kinds = ("CPU", "GPU") if with_gpu else ("CPU",)
    return sum(int(min(node.get(kind, 0) for kind in kinds)) for node in nodes)


def fit(sweep: Sweep, recipes: list[Recipe]) -> int:
    """Trials that run at a time: each gets all it needs, or none of it.

    Raises:
        UserError: One trial alone is too large.
    """
    slots = _slots()
    need = max(workers_of(recipe) for recipe in recipes)
    if need > slots:
        have = ray.cluster_resources()
        amounts = ", ".join(f"{have.get(kind, 0):g} {kind}" for kind in ("CPU", "GPU"))
        raise UserError(
            f"workers = {need}: a trial needs {need} CPU (and as many GPUs where there are some), "
            f"the cluster has {amounts}, room for {slots} worker(s). Ask for fewer workers or add "
            "nodes."
        )
    return min(slots // need, sweep.budget.concurrent or slots)


def lack(need: int) -> str:
    """What is asked and free, where `need` workers can't begin now; empty where they can."""
    free = ray.available_resources()
    kinds = ("CPU", "GPU") if ray.cluster_resources().get("GPU", 0) >= 1 else ("CPU",)
    short = [kind for kind in kinds if free.get(kind, 0) < need]
    return ", ".join(f"{need} {kind} asked, {free.get(kind, 0):g} free" for kind in short)
