"""Checkpoints on disk: the manifest is written last and commits; the newest valid one wins.

Layout of a run's `checkpoints/` folder:

    step-00000120/state.pt         plain tensors and numbers, `torch.load(..., weights_only=True)`
    step-00000120/manifest.json    size and SHA-256 of each file; written last
    step-00000120.1/               saved again at the same step, after steps that were skipped

A folder without a manifest is being written, or was left by a process that died; it is never read.
Nothing is renamed, since object stores can't rename folders.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Annotated, Any, cast

import torch
from pyarrow import fs
from pydantic import Field

from adaptive_platform.errors import CheckpointError
from adaptive_platform.progress import Duration, Unit
from adaptive_platform.settings import Settings
from adaptive_platform.storage import exists, join, open_location, read_bytes, write_bytes

__all__ = [
    "CheckpointConfig",
    "CheckpointStore",
    "DamagedCheckpointError",
    "SavedCheckpoint",
    "read_state",
]

_NAME = re.compile(r"^step-(\d+)(?:\.(\d+))?$")
_STATE = "state.pt"
_MANIFEST = "manifest.json"
_FORMAT = 1


class CheckpointConfig(Settings):
    """When to save, and how many to keep."""

    every: Duration = Duration(1.0, Unit.EPOCHS)
    """Training between two checkpoints, such as `1 epochs` or `100 steps`."""
    keep_last: Annotated[int, Field(ge=1)] = 2
    """Newest checkpoints kept; older ones are deleted after a new one is published."""
    keep_best: bool = True
    """Also keep the one with the best held-out score: the highest accuracy, or the lowest loss
    where there is no accuracy."""


@dataclass(frozen=True, slots=True, order=True)
class SavedCheckpoint:
    """A published checkpoint; ordered by age."""

    step: int
    again: int
    """0 for the first one saved at this step."""
    path: str


class DamagedCheckpointError(CheckpointError):
    """Its content is not what was written."""


class CheckpointStore:
    """The checkpoints of one run directory. One process writes, any number read.

    Args:
        run_dir: A local path or a URI that `pyarrow.fs` understands.
        timed: Told after each checkpoint how many seconds it took to write, on the thread that
            wrote it.

    Raises:
        UserError: No file system answers to the URI.
    """

    def __init__(self, run_dir: str, timed: Callable[[float], None] | None = None) -> None:
        self._timed = timed
        self._fs, base = open_location(run_dir)
        self._root = join(base, "checkpoints")

    def save(self, state: dict[str, Any], step: int) -> SavedCheckpoint:
        """Write one checkpoint; until its manifest is there it does not exist for readers.

        Args:
            state: Tensors, numbers, strings and containers of them.
            step: Committed steps it stands for.

        Raises:
            OSError: The storage failed; nothing was published and older checkpoints are intact.
        """
        began = time.perf_counter()
        # Above the newest, and not how many there are: older ones of this step may be deleted.
        again = max((again + 1 for at, again, _ in self._names() if at == step), default=0)
        folder = join(self._root, f"step-{step:08d}" + (f".{again}" if again else ""))
        self._fs.create_dir(folder, recursive=True)
        try:
            with self._fs.open_output_stream(join(folder, _STATE)) as stream:
                sink = _Hashing(stream)
                try:
                    torch.save(state, cast(IO[bytes], sink))
                except RuntimeError:
                    if sink.error is None:
                        raise
                    raise sink.error from None  # torch hides what the storage said
            manifest = {
                "format": _FORMAT,
                "step": step,
                "files": {_STATE: {"bytes": sink.size, "sha256": sink.digest()}},
            }
            write_bytes(self._fs, join(folder, _MANIFEST), json.dumps(manifest, indent=1).encode())
        except BaseException:
            self._delete_quietly(folder)
            raise
        if self._timed is not None:
            self._timed(time.perf_counter() - began)
        return SavedCheckpoint(step, again, folder)

    def saved(self) -> list[SavedCheckpoint]:
        """Published checkpoints, oldest first; not yet verified."""
        return sorted(
            SavedCheckpoint(step, again, path)
            for step, again, path in self._names()
            if exists(self._fs, join(path, _MANIFEST))
        )

    def load_newest(self) -> tuple[SavedCheckpoint, bytes, list[str]] | None:
        """The newest checkpoint that can be read; damaged newer ones are removed.

        Those that can't be read now, or not by this version, may be good and stay where they are.

        Returns:
            The checkpoint, its verified content for `read_state`, and one message per newer one
            that was passed over; None where nothing was ever published.

        Raises:
            CheckpointError: There are checkpoints, but none of them is valid.
        """
        reasons: list[str] = []
        damaged: list[SavedCheckpoint] = []
        for saved in reversed(self.saved()):
            try:
                content = self.read(saved)
            except DamagedCheckpointError as error:
                reasons.append(f"{error} It is removed.")
                damaged.append(saved)
                continue
            except CheckpointError as error:
                reasons.append(f"{error} It is left where it is.")
                continue
            for newer in damaged:  # Only now: a good one might be all there is.
                self._delete_quietly(newer.path)
            return saved, content, [f"{reason} Going back to an older one." for reason in reasons]
        if reasons:
            raise CheckpointError("resume: no checkpoint is usable.\n" + "\n".join(reasons))
        return None

    def read(self, saved: SavedCheckpoint) -> bytes:
        """The content of one checkpoint, verified against its checksum.

        Raises:
            DamagedCheckpointError: A file is missing, cut short or altered.
            CheckpointError: The storage refused, or the format is of another version.
        """
        try:
            manifest_data = read_bytes(self._fs, join(saved.path, _MANIFEST))
            data = read_bytes(self._fs, join(saved.path, _STATE))
        except (OSError, ValueError) as error:  # pyarrow's own complaints are among them
            raise CheckpointError(f"checkpoint {saved.path}: can't be read ({error}).") from error
        try:
            manifest = json.loads(manifest_data or b"")
            known = manifest["format"] == _FORMAT
            sha256, size = "", 0
            if known:
                sha256 = manifest["files"][_STATE]["sha256"]
                size = manifest["files"][_STATE]["bytes"]
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedCheckpointError(
                f"checkpoint {saved.path}: {_MANIFEST} can't be understood ({error})."
            ) from error
        if not known:
            raise CheckpointError(
                f"checkpoint {saved.path}: format {manifest['format']}; this version reads "
                f"{_FORMAT}."
            )
        if data is None or hashlib.sha256(data).hexdigest() != sha256:
            raise DamagedCheckpointError(
                f"checkpoint {saved.path}: {_STATE} differs from its checksum "
                f"({len(data or b'')} of {size} bytes)."
            )
        return data

    def prune(
        self, keep_last: int, keep_step: int | None, *, newest: SavedCheckpoint | None = None
    ) -> None:
        """Delete checkpoints beyond the newest `keep_last`, except those of `keep_step`.

        Args:
            keep_last: How many.
            keep_step: None for none.
            newest: What was saved last. Those of later steps could not be read when the run went
                back behind them: they don't count, and stay. None: there are none.
        """
        own = [saved for saved in self.saved() if newest is None or saved <= newest]
        for saved in own[:-keep_last]:
            if saved.step != keep_step:
                self._delete_quietly(saved.path)

    def clean_partial(self) -> int:
        """Delete what writers that died left behind; returns how many there were."""
        published = {saved.path for saved in self.saved()}
        left = [path for _, _, path in self._names() if path not in published]
        for path in left:
            self._delete_quietly(path)
        return len(left)

    def _names(self) -> list[tuple[int, int, str]]:
        found = []
        for info in self._fs.get_file_info(fs.FileSelector(self._root, allow_not_found=True)):
            match = _NAME.match(info.base_name)
            if match and info.type is fs.FileType.Directory:
                found.append((int(match[1]), int(match[2] or 0), info.path))
        return found

    def _delete_quietly(self, path: str) -> None:
        try:
            self._fs.delete_dir(path)
        except OSError:
            # What can't be deleted now is deleted by a later `clean_partial` or `prune`; a full
            # or vanished disk must not hide the error that brought us here.
            return


def read_state(content: bytes) -> dict[str, Any]:
    """Load verified content, tensors on the CPU. Code in it can't run.

    Raises:
        CheckpointError: Not a dictionary of plain tensors and values.
    """
    try:
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(f"checkpoint: not a file of plain tensors ({reason}).") from error
    if not isinstance(state, dict):
        raise CheckpointError("checkpoint: holds no state dictionary.")
    return state


class _Hashing:
    """A stream that counts and hashes what passes through."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._hash = hashlib.sha256()
        self.size = 0
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        self._hash.update(data)
        self.size += len(data)
        try:
            self._stream.write(data)
        except OSError as error:
            self.error = error
            raise
        return len(data)

    def flush(self) -> None:
        self._stream.flush()

    def digest(self) -> str:
        return self._hash.hexdigest()
