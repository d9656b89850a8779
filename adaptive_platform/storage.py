"""Files on any pyarrow file system, each appearing whole or not at all."""

from __future__ import annotations

import os
from typing import Any

from adaptive_platform.errors import UserError

__all__ = ["exists", "is_hidden", "is_local", "join", "open_location", "read_bytes", "write_bytes"]


def open_location(location: str | os.PathLike[str]) -> tuple[Any, str]:
    """The pyarrow file system of a path or URI, and the path within it.

    Args:
        location: A local path, relative or not, or a URI such as `s3://bucket/run`.

    Raises:
        UserError: No file system answers to the URI.
    """
    from pyarrow import ArrowInvalid, fs

    text = os.fspath(location)
    if "://" not in text:
        return fs.LocalFileSystem(), os.path.abspath(os.path.expanduser(text))
    try:
        system, path = fs.FileSystem.from_uri(text)
    except (ArrowInvalid, NotImplementedError) as error:
        raise UserError(
            f"{text}: no file system for this address ({error}). "
            "Give a local path, or a URI of s3://, gs://, hdfs:// or file://."
        ) from error
    return system, path


def is_local(system: Any) -> bool:
    """True for the file system of this machine."""
    from pyarrow import fs

    return isinstance(system, fs.LocalFileSystem)


def exists(system: Any, path: str) -> bool:
    """True when there is a file or folder at `path`."""
    from pyarrow import fs

    return bool(system.get_file_info(path).type != fs.FileType.NotFound)


def join(folder: str, name: str) -> str:
    """Path of `name` in `folder`; all pyarrow file systems use forward slashes."""
    return f"{folder.rstrip('/')}/{name}"


def is_hidden(name: str) -> bool:
    """True for names that Parquet readers pass over when they read a folder."""
    return name.startswith(("_", "."))


def write_bytes(system: Any, path: str, data: bytes) -> None:
    """Write under a hidden temporary name beside `path`, then move it there.

    A reader sees the old content or the new, never a part; a leftover of a killed writer is
    hidden and overwritten by the next. The folder must exist.

    Raises:
        OSError: The storage refused. `path` is as it was.
    """
    folder, _, name = path.rpartition("/")
    temporary = join(folder, f"_{name}.tmp")
    with system.open_output_stream(temporary) as stream:
        stream.write(data)
    system.move(temporary, path)


def read_bytes(system: Any, path: str) -> bytes | None:
    """Content of a file, or None where there is no such file."""
    try:
        with system.open_input_stream(path) as stream:
            data: bytes = stream.read()
    except FileNotFoundError:
        return None
    return data
