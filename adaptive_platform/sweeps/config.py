"""A sweep's whole configuration: recipe, space, scheduler, searcher, budget; read from YAML."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from adaptive_platform.errors import UserError
from adaptive_platform.recipe import (
    Recipe,
    apply_overrides,
    load_recipe,
    parse_overrides,
    read_mapping,
)
from adaptive_platform.recipe.overrides import fields_of
from adaptive_platform.settings import Settings, user_error
from adaptive_platform.storage import join, open_location, read_bytes
from adaptive_platform.sweeps.schedulers import AnyScheduler, NoScheduler, Pbt
from adaptive_platform.sweeps.searchers import AnySearcher, Random
from adaptive_platform.sweeps.space import AnyDimension, check_space

__all__ = ["SWEEP_NAME", "Budget", "Sweep", "load_sweep", "read_sweep", "shipped_sweeps"]

SWEEP_NAME = "sweep.yaml"
"""File of a sweep's directory with its whole configuration."""

_OWN = frozenset(["out", "resume", "address", "workers", "name", "description"])
"""Recipe fields that the sweep itself decides about."""


class Budget(Settings):
    """How much a sweep may use."""

    trials: Annotated[int, Field(ge=1)] | None = None
    """Trials in all. Nothing: every combination of a grid, else 10."""
    seconds: Annotated[float, Field(gt=0)] | None = None
    """Wall time after which no trial goes on. Nothing: no limit."""
    concurrent: Annotated[int, Field(ge=1)] | None = None
    """Trials at a time, at most. Nothing: as many as fit into the cluster."""


class Sweep(Settings):
    """Everything that defines a sweep; `sweep.yaml` in its directory is enough to run it again."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "sweep"
    """Name in file names, reports and metrics."""
    description: str = ""
    """One line for people."""
    recipe: str | dict[str, Any] = "quickstart"
    """What each trial runs: a shipped recipe, a YAML file, or a recipe's content."""
    set: dict[str, Any] = Field(default={})
    """Recipe fields, with dots, that are the same in all trials and differ from the recipe."""
    space: Annotated[dict[str, AnyDimension], Field(min_length=1)]
    """Recipe fields, with dots, that differ between trials, and the values they may take."""
    metric: Literal["accuracy", "loss"] = "accuracy"
    """Held-out score that trials are compared by, at their last evaluation."""
    scheduler: AnyScheduler = NoScheduler()
    """Which trials go on."""
    searcher: AnySearcher = Random()
    """Who proposes the next trial."""
    workers: Annotated[int, Field(ge=1)] = 1
    """Workers of a trial; each takes one CPU, and one GPU where the cluster has some."""
    budget: Budget = Budget()
    """How much the sweep may use."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Fixes which trials are drawn."""
    out: str | None = None
    """Directory of the sweep: a path or a pyarrow URI. Nothing: `sweeps/<name>-<time>`."""
    address: str | None = None
    """Ray cluster to join, such as `auto`. Nothing: RAY_ADDRESS where set, else a local Ray."""

    @model_validator(mode="after")
    def _fits_together(self) -> Sweep:
        for where, fields in (("set", self.set), ("space", self.space)):
            odd = [name for name in fields if name.split(".")[0] in _OWN]
            if odd:
                raise ValueError(
                    f"{where}.{odd[0]}: the sweep itself decides about that; leave it away, or set "
                    "the sweep's own field"
                )
        both = [name for name in self.space if name in self.set]
        if both:
            raise ValueError(f"space.{both[0]}: it is under `set` as well; leave one of them away")
        check_space(self.space)
        problem = self.scheduler.problem(self.space)
        if problem:
            raise ValueError(problem.rstrip("."))
        return self

    def base(self, drawn: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Content of the recipe that all trials share.

        Args:
            drawn: Fields of one trial. What is set for all of them counts beside a drawn `kind`
                too, where that kind has such a field; its others begin at their defaults.
        """
        content = load_recipe(self.recipe).model_dump(mode="json")
        drawn = drawn or {}
        fields = {n: v for n, v in self.set.items() if _exists_beside(n, drawn)} | dict(drawn)
        pairs = [(name.split("."), value) for name, value in fields.items()]
        if "report.html" not in self.set:
            pairs.append((["report", "html"], False))
        content = apply_overrides({**content, "workers": self.workers}, pairs)
        if isinstance(self.scheduler, Pbt):
            # Who takes over goes on from where the other was scored.
            length = load_recipe(content).stop.horizon
            every = str(replace(length, value=length.value * self.scheduler.every_percent / 100))
            content["checkpoint"] = {**content["checkpoint"], "every": every}
            content["report"] = {**content["report"], "evaluate_every": every}
        return content

    def recipe_of(self, fields: Mapping[str, Any]) -> Recipe:
        """The recipe of a trial.

        Args:
            fields: What was drawn for it.

        Raises:
            UserError: The fields make no valid recipe; the message names the one at fault.
        """
        return load_recipe(self.base(fields))

    def to_yaml(self) -> str:
        """The sweep as YAML that `load_sweep` reads back to an equal sweep."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _exists_beside(name: str, drawn: Mapping[str, Any]) -> bool:
    room, *rest = name.split(".")
    kind = drawn.get(f"{room}.kind")
    return kind is None or not rest or rest[0] in fields_of(room, kind)


def _fields(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = content.get(name) or {}
    if not isinstance(found, Mapping):
        raise UserError(
            f"{name} = {found!r}: must be recipe fields with their values, a line each, such as "
            f"`optimizer.lr: ...` (a YAML mapping, not a {type(found).__name__})."
        )
    return dict(found)


def shipped_sweeps() -> dict[str, str]:
    """Names of the sweeps in the package with their one-line descriptions."""
    found = {}
    for path in sorted(_folder().glob("*.yaml")):
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        found[path.stem] = str(content.get("description", ""))
    return found


def load_sweep(source: str | Path | dict[str, Any], words: list[str] | None = None) -> Sweep:
    """Read a shipped sweep by name, a YAML file by path, or a dictionary.

    Args:
        source: `warmup-lars`, `path/to/sweep.yaml` or the sweep's content.
        words: `field=value` words. Those that begin with a field of the sweep change the sweep;
            all others are recipe fields that every trial gets.

    Raises:
        UserError: No such sweep, not YAML, or a field that is unknown, missing or out of range.
    """
    content, origin = (source, "") if isinstance(source, dict) else _read(str(source))
    own = []
    fixed, space = (_fields(content, name) for name in ("set", "space"))
    for names, value in parse_overrides(words or []):
        if names[0] in ("space", "set") and len(names) > 1:
            raise UserError(
                f"{'.'.join(names)}: the space is changed in the sweep's file; a recipe field such "
                "as stop.epochs=2 is given to all trials without a prefix."
            )
        if names[0] in Sweep.model_fields:
            own.append((names, value))
        else:
            name = ".".join(names)
            space.pop(name, None)
            fixed[name] = value
    content = apply_overrides({**content, "set": fixed, "space": space}, own)
    try:
        return Sweep.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        if not first["loc"] and first["type"] == "value_error":
            said = f"{first['ctx']['error']}."
            raise UserError(f"{origin}: {said}" if origin else said) from None
        raise user_error(error, Sweep, origin) from None


def read_sweep(sweep_dir: str) -> Sweep:
    """The sweep of a sweep's directory.

    Raises:
        UserError: There is none, or it can't be read.
    """
    system, root = open_location(sweep_dir)
    text = read_bytes(system, join(root, SWEEP_NAME))
    if text is None:
        raise UserError(
            f"resume = {sweep_dir}: this is no directory of a sweep (no {SWEEP_NAME} in it). Name "
            "the directory that the sweep printed."
        )
    return load_sweep(read_mapping(text, f"{sweep_dir}/{SWEEP_NAME}"))


def _folder() -> Path:
    """`shipped_sweeps` in an installed package, `experiments/sweeps` beside a checked-out one."""
    package = Path(__file__).parents[1]
    installed = package / "shipped_sweeps"
    return installed if installed.is_dir() else package.parent / "experiments" / "sweeps"


def _read(source: str) -> tuple[dict[str, Any], str]:
    shipped = shipped_sweeps()
    path = _folder() / f"{source}.yaml" if source in shipped else Path(source)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        if isinstance(error, FileNotFoundError):
            close = difflib.get_close_matches(source, shipped, n=1)
            hint = f" Did you mean `{close[0]}`?" if close else ""
            raise UserError(
                f"sweep = {source}: there is no shipped sweep and no file of that name.{hint} "
                f"Shipped: {', '.join(shipped)}."
            ) from None
        raise UserError(f"{source}: can't be read as UTF-8 text ({error}).") from None
    return read_mapping(text, source), source
