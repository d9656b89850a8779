"""The run directory seen from the driver: chosen, checked and cleared up before and after a run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pyarrow.fs import FileSelector
from pydantic import ValidationError

from adaptive_platform.errors import UserError
from adaptive_platform.recipe import Recipe
from adaptive_platform.report.run_data import RECIPE_NAME
from adaptive_platform.settings import user_error
from adaptive_platform.storage import exists, is_local, join, open_location, read_bytes, write_bytes

__all__ = ["RunDirectory", "recipe_of_run"]


@dataclass(slots=True)
class RunDirectory:
    """Where a run keeps what it makes."""

    path: str
    """Absolute path or URI."""
    recipe: Recipe
    """With `out` filled in."""
    _made: str | None
    """The outermost folder that had to be made for it; None where it was there, and empty."""
    _recipe_before: bytes | None
    """The `recipe.yaml` of the run that is resumed; None for a new run."""
    _kept: bool = field(default=False, init=False)

    @classmethod
    def prepare(cls, recipe: Recipe) -> RunDirectory:
        """Make or check the directory that `recipe` asks for, and write `recipe.yaml` into it.

        Raises:
            UserError: It can't be written, holds another run, or there is nothing to resume.
        """
        resuming = recipe.resume is not None
        path = _absolute(recipe.resume or recipe.out or _default(recipe.name))
        if resuming and recipe.out is not None and _absolute(recipe.out) != path:
            raise UserError(
                f"out = {recipe.out}: a resumed run goes on in its own directory {path}. "
                "Leave `out` away."
            )
        recipe = recipe.model_copy(update={"out": path})
        system, root = _open("resume" if resuming else "out", path)
        try:
            known = read_bytes(system, join(root, RECIPE_NAME)) is not None
        except OSError as error:
            raise _unwritable(path, error) from None
        if resuming and not known:
            raise UserError(
                f"resume = {recipe.resume}: this is no run directory (no {RECIPE_NAME} in it). "
                "Name the directory that the run printed."
            )
        if known and not resuming:
            raise UserError(
                f"out = {path}: it already holds a run. Continue that one with resume={path}, or "
                "choose another directory."
            )
        if not resuming and exists(system, root) and system.get_file_info(FileSelector(root)):
            raise UserError(
                f"out = {path}: it is not empty and holds no run. Choose another directory."
            )
        stored = recipe.model_copy(update={"resume": None})
        try:
            before = read_bytes(system, join(root, RECIPE_NAME))
            made = _to_be_made(system, root)
            system.create_dir(root, recursive=True)
            write_bytes(system, join(root, RECIPE_NAME), stored.to_yaml().encode())
        except OSError as error:
            raise _unwritable(path, error) from None
        return cls(path, recipe, made, before)

    def keep(self) -> None:
        """The run left something worth keeping."""
        self._kept = True

    @contextmanager
    def cleared_if_unused(self) -> Iterator[None]:
        """Leave things as they were when the run never came to its first step."""
        try:
            yield
        finally:
            self._clear()

    def _clear(self) -> None:
        system, root = open_location(self.path)
        ray_folder = join(root, ".ray")
        if exists(system, ray_folder):
            system.delete_dir(ray_folder)
        if self._kept:
            return
        if self._recipe_before is not None:
            write_bytes(system, join(root, RECIPE_NAME), self._recipe_before)
        elif self._made is None:
            system.delete_dir_contents(root)
        else:
            system.delete_dir(root)
            if is_local(system):
                _remove_empty_parents(root, self._made)


def recipe_of_run(run_dir: str) -> dict[str, Any]:
    """The content of a run directory's `recipe.yaml`.

    Raises:
        UserError: There is none, or it is not a recipe.
    """
    system, root = _open("resume", _absolute(run_dir))
    data = read_bytes(system, join(root, RECIPE_NAME))
    if data is None:
        raise UserError(
            f"resume = {run_dir}: this is no run directory (no {RECIPE_NAME} in it). Name the "
            "directory that the run printed."
        )
    content = yaml.safe_load(data)
    try:
        Recipe.model_validate(content)
    except ValidationError as error:
        raise user_error(error, Recipe, f"{run_dir}/{RECIPE_NAME}") from None
    assert isinstance(content, dict)
    return content


def _open(field_name: str, path: str) -> tuple[Any, str]:
    try:
        return open_location(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{field_name} = {path}: {error}") from None


def _unwritable(path: str, error: OSError) -> UserError:
    return UserError(
        f"out = {path}: can't be written ({error.strerror or error}). Choose a directory that you "
        "may write to."
    )


def _to_be_made(system: Any, root: str) -> str | None:
    """The outermost folder above or at `root` that is not there; None where all are."""
    if exists(system, root):
        return None
    missing = Path(root)
    while is_local(system) and not missing.parent.exists():
        missing = missing.parent
    return str(missing)


def _remove_empty_parents(root: str, outermost: str) -> None:
    """Remove what was made above `root`, unless somebody put something there since."""
    folder = Path(root)
    while str(folder) != outermost and folder.parent != folder:
        folder = folder.parent
        try:
            folder.rmdir()
        except OSError:
            return


def _absolute(path: str) -> str:
    return path if "://" in path else str(Path(path).expanduser().absolute())


def _default(name: str) -> str:
    """`runs/<name>-<time>`, with a number behind it where two runs start in one second.

    A submitted job works in a copy of its folder that Ray deletes with the job; its runs go to
    `~/ray_results`, where Ray Train keeps its own.
    """
    home = Path.home() / "ray_results" if "_ray_pkg_" in str(Path.cwd()) else Path("runs")
    base = home / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = base, 2
    while path.exists():
        path, number = base.with_name(f"{base.name}-{number}"), number + 1
    return str(path)
