"""The run directory seen from the driver: chosen, checked and cleared up before and after a run."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from pyarrow.fs import FileSelector, FileType
from pydantic import ValidationError

from adaptive_platform.errors import UserError
from adaptive_platform.recipe import Recipe, read_mapping
from adaptive_platform.report.run_data import RECIPE_NAME
from adaptive_platform.settings import user_error
from adaptive_platform.storage import exists, is_local, join, open_location, read_bytes, write_bytes

__all__ = ["RunDirectory", "discard", "hold", "recipe_of_run"]

_LOCK_NAME = ".lock"


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
    @contextmanager
    def taken(cls, recipe: Recipe) -> Iterator[RunDirectory]:
        """Make or check the directory that `recipe` asks for, and hold it with `recipe.yaml` in it.

        Things are left as they were when the run never came to its first step.

        Raises:
            UserError: It can't be written, holds another run, there is nothing to resume, or
                another process of this machine is at work in it, whose files are left alone.
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
        _check(system, root, recipe)
        try:
            made = _to_be_made(system, root)
            system.create_dir(root, recursive=True)
        except OSError as error:
            raise _unwritable(path, error) from None
        unused = False
        try:
            with _held(system, root, path):
                before = _check(system, root, recipe)  # Somebody may have been here meanwhile.
                directory = cls(path, recipe, made, before)
                try:
                    directory._write_recipe(system, root)
                    yield directory
                finally:
                    unused = directory._clear(system, root)
        finally:
            if unused and made is not None and is_local(system):
                _remove_if_empty(root, made)

    def keep(self) -> None:
        """The run left something worth keeping."""
        self._kept = True

    def _write_recipe(self, system: Any, root: str) -> None:
        stored = self.recipe.model_copy(update={"resume": None})
        try:
            write_bytes(system, join(root, RECIPE_NAME), stored.to_yaml().encode())
        except OSError as error:
            raise _unwritable(self.path, error) from None

    def _clear(self, system: Any, root: str) -> bool:
        """Remove what nobody needs; True where nothing is left of the run."""
        ray_folder = join(root, ".ray")
        if exists(system, ray_folder):
            system.delete_dir(ray_folder)
        checkpoints = join(root, "checkpoints")
        if self._kept or (self._recipe_before is None and exists(system, checkpoints)):
            return False  # Whatever ended the run, what was saved is worth more than tidiness.
        if self._recipe_before is not None:
            write_bytes(system, join(root, RECIPE_NAME), self._recipe_before)
            return False
        if not is_local(system) and self._made is not None:
            system.delete_dir(root)
            return True
        _empty(system, root)
        return True


def discard(path: str) -> None:
    """Remove a run directory with all that is in it.

    Raises:
        UserError: Another process of this machine is at work in it.
    """
    system, root = open_location(path)
    if not is_local(system):
        system.delete_dir(root)
        return
    with _held(system, root, path):
        _empty(system, root)
    _remove_if_empty(root, root)


def hold(run_dir: str) -> AbstractContextManager[None]:
    """Keep other processes out of a run directory, which is made where it is missing.

    Raises:
        UserError: Another process is at work there, or it can't be written to.
    """
    system, root = _open("out", run_dir)
    try:
        system.create_dir(root, recursive=True)
    except OSError as error:
        raise _unwritable(run_dir, error) from None
    return _held(system, root, run_dir)


def _held(system: Any, root: str, path: str) -> AbstractContextManager[None]:
    return _Lock(join(root, _LOCK_NAME), path) if is_local(system) else nullcontext()


class _Lock:
    """Held by the process that runs a directory; the system lets go of it when that process ends.

    What is not promised: processes on other machines are kept out only where the file system
    passes locks on.
    """

    def __init__(self, path: str, shown: str) -> None:
        self._path = path
        self._shown = shown
        self._file: IO[str] | None = None

    def __enter__(self) -> None:
        while self._file is None:
            try:
                file = open(self._path, "a+", encoding="utf-8")
            except OSError as error:
                raise _unwritable(self._shown, error) from None
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                file.close()
                raise UserError(
                    f"{self._shown}: another process is at work in this run. Wait for it, stop "
                    "it, or choose another directory."
                ) from None
            if self._is_there(file):
                self._file = file
            else:  # The one that held it has just removed it.
                file.close()

    def _is_there(self, file: IO[str]) -> bool:
        with suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(file.fileno()), os.stat(self._path))
        return False

    def __exit__(self, *_: object) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self._path)  # while it is held: nobody else's can be hit
        if self._file is not None:
            self._file.close()


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


def _check(system: Any, root: str, recipe: Recipe) -> bytes | None:
    """See whether the directory is what `recipe` takes it for.

    Returns:
        Its `recipe.yaml`; None for a new run.

    Raises:
        UserError: It is not, or can't be read.
    """
    path = recipe.out
    try:
        known = read_bytes(system, join(root, RECIPE_NAME))
    except OSError as error:
        raise _unwritable(path or root, error) from None
    if recipe.resume is not None:
        if known is None:
            raise UserError(
                f"resume = {recipe.resume}: this is no run directory (no {RECIPE_NAME} in it). "
                "Name the directory that the run printed."
            )
        return known
    if known is not None:
        raise UserError(
            f"out = {path}: it already holds a run. Continue that one with resume={path}, or "
            "choose another directory."
        )
    if exists(system, root) and _content(system, root):
        raise UserError(
            f"out = {path}: it is not empty and holds no run. Choose another directory."
        )
    return None


def _content(system: Any, root: str) -> list[Any]:
    """What lies in a directory besides the lock."""
    found = system.get_file_info(FileSelector(root))
    return [info for info in found if info.base_name != _LOCK_NAME]


def _empty(system: Any, root: str) -> None:
    for info in _content(system, root):
        if info.type is FileType.Directory:
            system.delete_dir(info.path)
        else:
            system.delete_file(info.path)


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


def _remove_if_empty(root: str, outermost: str) -> None:
    """Remove `root` and what was made above it, unless somebody put something there since."""
    folder = Path(root)
    with suppress(OSError):
        folder.rmdir()
        while str(folder) != outermost and folder.parent != folder:
            folder = folder.parent
            folder.rmdir()


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
