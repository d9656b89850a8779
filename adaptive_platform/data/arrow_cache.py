"""Memory-mapped copies of Parquet rows: a large set is paged in by the system, not loaded."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Sequence
from typing import Any

__all__ = ["mapped_copy"]


def mapped_copy(
    path: str, groups: Sequence[int], rows: int, columns: Sequence[str], folder: str
) -> Any:
    """Open rows of a Parquet file through an Arrow copy on disk, written where it is missing.

    The copy's name holds path, size and change time of the file, so a changed file gets another
    copy. It is published by renaming: workers that write it at once do not disturb each other.

    Args:
        path: Parquet file.
        groups: Its row groups to copy, one at a time.
        rows: Rows of them to return.
        columns: Columns to copy.
        folder: Where copies lie; made where it is missing.

    Returns:
        A `pyarrow.Table` whose buffers are the mapped file.

    Raises:
        OSError: The folder can't be written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    found = os.stat(path)
    identity = repr((path, found.st_size, found.st_mtime_ns, list(groups), list(columns)))
    name = hashlib.sha256(identity.encode()).hexdigest()[:24]
    copy = os.path.join(folder, f"{name}.arrow")
    if not os.path.exists(copy):
        os.makedirs(folder, exist_ok=True)
        handle, partial = tempfile.mkstemp(prefix=name, suffix=".partial", dir=folder)
        os.close(handle)
        try:
            with pq.ParquetFile(path) as source:
                schema = pa.schema([source.schema_arrow.field(column) for column in columns])
                with pa.OSFile(partial, "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
                    for group in groups:
                        writer.write_table(source.read_row_group(group, columns=list(columns)))
            os.replace(partial, copy)
        finally:
            if os.path.exists(partial):
                os.remove(partial)
    return pa.ipc.open_file(pa.memory_map(copy)).read_all().slice(0, rows)
