"""Checkpoints on disk: written aside, checksummed, then published; the newest valid one wins.

Layout of a run's `checkpoints/` folder:

    step-00000120/state.pt         plain tensors and numbers, `torch.load(..., weights_only=True)`
    step-00000120/manifest.json    size and SHA-256 of each file; written last
    .partial-...                   being written, or left by a process that died; never read
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import uuid
from dataclasses import dataclass
from typing import IO, Annotated, Any, cast

import torch
from pyarrow import fs
from pydantic import Field

from adaptive_platform.errors import CheckpointError
from adaptive_platform.progress import Duration, Unit
from adaptive_platform.settings import Settings

__all__ = ["CheckpointConfig", "CheckpointStore", "SavedCheckpoint"]

_NAME = re.compile(r"^step-(\d+)$")
_PARTIAL = ".partial-"
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
    """Also keep the one with the best held-out score."""


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A published checkpoint."""

    path: str
    step: int


class CheckpointStore:
    """The checkpoints of one run directory. One process writes, any number read.

    Args:
        run_dir: A local path or a URI that `pyarrow.fs` understands.
    """

    def __init__(self, run_dir: str) -> None:
        filesystem, base = _resolve(run_dir)
        self._fs = filesystem
        self._root = f"{base.rstrip('/')}/checkpoints"

    def save(self, state: dict[str, Any], step: int) -> SavedCheckpoint:
        """Write one checkpoint; it appears whole or not at all.

        Args:
            state: Tensors, numbers, strings and containers of them.
            step: Committed steps it stands for.

        Raises:
            OSError: The storage failed; nothing was published and older checkpoints are intact.
        """
        final = f"{self._root}/step-{step:08d}"
        partial = f"{self._root}/{_PARTIAL}{step:08d}-{uuid.uuid4().hex[:8]}"
        self._fs.create_dir(partial, recursive=True)
        try:
            with self._fs.open_output_stream(f"{partial}/{_STATE}") as stream:
                sink = _Hashing(stream)
                torch.save(state, cast(IO[bytes], sink))
            manifest = {
                "format": _FORMAT,
                "step": step,
                "files": {_STATE: {"bytes": sink.size, "sha256": sink.digest()}},
            }
            with self._fs.open_output_stream(f"{partial}/{_MANIFEST}") as stream:
                stream.write(json.dumps(manifest, indent=1).encode())
            replaced = f"{self._root}/{_PARTIAL}replaced-{uuid.uuid4().hex[:8]}"
            if self._exists(final):
                self._fs.move(final, replaced)
            self._fs.move(partial, final)
            if self._exists(replaced):
                self._delete_quietly(replaced)
        except BaseException:
            self._delete_quietly(partial)
            raise
        return SavedCheckpoint(final, step)

    def saved(self) -> list[SavedCheckpoint]:
        """Published checkpoints, oldest first; not yet verified."""
        found = []
        for info in self._fs.get_file_info(fs.FileSelector(self._root, allow_not_found=True)):
            match = _NAME.match(info.base_name)
            if match and info.type is fs.FileType.Directory:
                found.append(SavedCheckpoint(info.path, int(match[1])))
        return sorted(found, key=lambda saved: saved.step)

    def load_newest(self) -> tuple[SavedCheckpoint, dict[str, Any], list[str]] | None:
        """The newest checkpoint whose checksums hold.

        Returns:
            The checkpoint, its state and one message per newer one that was passed over; None
            where there is no valid checkpoint and none was tried.

        Raises:
            CheckpointError: There are checkpoints, but none of them is valid.
        """
        messages: list[str] = []
        for saved in reversed(self.saved()):
            try:
                return saved, self.load(saved), messages
            except CheckpointError as error:
                messages.append(f"{error} Going back to an older one.")
        if messages:
            raise CheckpointError(
                "resume: no checkpoint is usable.\n"
                + "\n".join(messages).replace(" Going back to an older one.", "")
            )
        return None

    def load(self, saved: SavedCheckpoint) -> dict[str, Any]:
        """Verify the checksums of one checkpoint and load it, tensors on the CPU.

        Raises:
            CheckpointError: A file is missing, cut short or altered, or of an unknown format.
        """
        try:
            manifest = json.loads(self._read(f"{saved.path}/{_MANIFEST}"))
            expected = manifest["files"][_STATE]
            known = manifest["format"] == _FORMAT
            data = self._read(f"{saved.path}/{_STATE}")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"checkpoint {saved.path}: can't be read ({error}).") from error
        if not known:
            raise CheckpointError(
                f"checkpoint {saved.path}: format {manifest['format']}; this version reads "
                f"{_FORMAT}."
            )
        if hashlib.sha256(data).hexdigest() != expected["sha256"]:
            raise CheckpointError(
                f"checkpoint {saved.path}: {_STATE} differs from its checksum "
                f"({len(data)} of {expected['bytes']} bytes)."
            )
        try:
            state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:
            raise CheckpointError(
                f"checkpoint {saved.path}: not a file of plain tensors ({error})."
            ) from error
        if not isinstance(state, dict):
            raise CheckpointError(f"checkpoint {saved.path}: holds no state dictionary.")
        return state

    def prune(self, keep_last: int, keep_step: int | None) -> None:
        """Delete checkpoints beyond the newest `keep_last`, except that of `keep_step`."""
        for saved in self.saved()[:-keep_last]:
            if saved.step != keep_step:
                self._delete_quietly(saved.path)

    def clean_partial(self) -> int:
        """Delete what writers that died left behind; returns how many there were."""
        selector = fs.FileSelector(self._root, allow_not_found=True)
        left = [i for i in self._fs.get_file_info(selector) if i.base_name.startswith(_PARTIAL)]
        for info in left:
            self._delete_quietly(info.path)
        return len(left)

    def _read(self, path: str) -> bytes:
        with self._fs.open_input_stream(path) as stream:
            return bytes(stream.read())

    def _exists(self, path: str) -> bool:
        return bool(self._fs.get_file_info(path).type is not fs.FileType.NotFound)

    def _delete_quietly(self, path: str) -> None:
        try:
            self._fs.delete_dir(path)
        except OSError:
            # What can't be deleted now is deleted by a later `clean_partial` or `prune`; a full
            # or vanished disk must not hide the error that brought us here.
            return


class _Hashing:
    """A stream that counts and hashes what passes through."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._hash = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes) -> int:
        self._hash.update(data)
        self.size += len(data)
        self._stream.write(data)
        return len(data)

    def flush(self) -> None:
        self._stream.flush()

    def digest(self) -> str:
        return self._hash.hexdigest()


def _resolve(run_dir: str) -> tuple[Any, str]:
    if "://" in run_dir:
        filesystem, path = fs.FileSystem.from_uri(run_dir)
        return filesystem, path
    return fs.LocalFileSystem(), run_dir
