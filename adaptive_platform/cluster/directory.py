"""The run directory seen from the driver: chosen, checked and cleared up before and after a run."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from pyarrow.fs import FileSelector
from pydantic import ValidationError

from adaptive_platform.errors import UserError
from adaptive_platform.recipe import Recipe, read_mapping
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
        if Path(root) == Path("/"):
            raise UserError(f"out = {path}: name a folder below it.")
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
        """Leave things as they were when the run never came to its first step.

        Raises:
            UserError: Another process of this machine is at work in the directory.
        """
        system, root = open_location(self.path)
        lock = _Lock(join(root, ".lock")) if is_local(system) else nullcontext()
        try:
            with lock:
                yield
        finally:
            self._clear()

    def _clear(self) -> None:
        system, root = open_location(self.path)
        ray_folder = join(root, ".ray")
        if exists(system, ray_folder):
            system.delete_dir(ray_folder)
        checkpoints = join(root, "checkpoints")
        if self._kept or (self._recipe_before is None and exists(system, checkpoints)):
            return  # Whatever ended the run, what was saved is worth more than a tidy folder.
        if self._recipe_before is not None:
            write_bytes(system, join(root, RECIPE_NAME), self._recipe_before)
        elif self._made is None:
            system.delete_dir_contents(root)
        else:
            system.delete_dir(root)
            if is_local(system):
                _remove_empty_parents(root, self._made)


class _Lock:
    """Held by the process that runs a directory; the system lets go of it when that process ends.

    What is not promised: processes on other machines are kept out only where the file system
    passes locks on.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._file: IO[str] | None = None

    def __enter__(self) -> None:
        self._file = open(self._path, "a+", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise UserError(
                f"{os.path.dirname(self._path)}: another process is at work in this run. Wait for "
                "it, stop it, or choose another directory."
            ) from None

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
        with suppress(FileNotFoundError):
            os.unlink(self._path)


def recipe_of_run(run_dir: str) -> dict[str, Any]:
    """The content of a run directory's `recipe.yaml`.

    Raises:
        UserError: There is none, or it is not a recipe.
    """
    system, root = _open("resume", _absolute(run_dir))
    try:
        data = read_bytes(system, join(root, RECIPE_NAME))
    except OSError:
        data = None
    if data is None:
        raise UserError(
            f"resume = {run_dir}: this is no run directory (no {RECIPE_NAME} in it). Name the "
            "directory that the run printed."
        )
    content = read_mapping(data, f"{run_dir}/{RECIPE_NAME}")
    try:
        Recipe.model_validate(content)
    except ValidationError as error:
        raise user_error(error, Recipe, f"{run_dir}/{RECIPE_NAME}") from None
    return content


def _open(field_name: str, path: str) -> tuple[Any, str]:
    try:
        return open_location(path)
    except UserError:
        raise
    except (OSError, ValueError) as error:  # pyarrow's own complaints are among them
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
