"""Parquet files on storage: which there are, which of their rows are read, and rows as a table."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from adaptive_platform.errors import DataError

__all__ = [
    "Table",
    "group_bytes",
    "is_bytes",
    "is_text",
    "joined",
    "needed_groups",
    "parquet_files",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The two columns of one part, over all its files."""

    field: str
    files: list[str]
    starts: list[int]
    """Row at which each file begins, and the end."""
    images: Any
    """Arrow column of encoded images, as bytes or with a field `bytes`."""
    labels: Any
    """Arrow column of class numbers or names."""
    class_names: tuple[str, ...] | None
    """Those in the first file's schema."""

    def encoded(self, row: int) -> bytes:
        """Encoded image in a row; empty where there is none."""
        value = self.images[row].as_py()
        if isinstance(value, dict):
            value = value["bytes"]
        return value or b""

    def where(self, row: int) -> str:
        """File and row in it, from 0."""
        k = bisect_right(self.starts, row) - 1
        return f"{self.files[k]} row {row - self.starts[k]}"


def parquet_files(field: str, path: str) -> list[str]:
    """The file, or those in the folder, by name.

    Raises:
        DataError: There is none.
    """
    if os.path.isfile(path):
        return [path]
    if not os.path.isdir(path):
        raise DataError(
            f"{field} = {path}: does not exist. Name a Parquet file or a folder of them."
        )
    names = sorted(n for n in os.listdir(path) if n.endswith(".parquet") and n[0] not in "._")
    if not names:
        raise DataError(f"{field} = {path}: there is no *.parquet file in this folder.")
    return [os.path.join(path, name) for name in names]


def needed_groups(metadata: Any, missing: int | None) -> tuple[list[int], int]:
    """Row groups to read for `missing` more rows, and how many rows to use of them."""
    groups: list[int] = []
    rows = 0
    for group in range(metadata.num_row_groups):
        if missing is not None and rows >= missing:
            break
        groups.append(group)
        rows += metadata.row_group(group).num_rows
    return groups, rows if missing is None else min(rows, missing)


def group_bytes(metadata: Any, group: int, columns: Sequence[str]) -> int:
    """Bytes that the columns of one row group take in memory."""
    found = metadata.row_group(group)
    parts = [found.column(k) for k in range(found.num_columns)]
    return sum(
        part.total_uncompressed_size
        for part in parts
        if part.path_in_schema.split(".")[0] in columns
    )


def joined(tables: list[Any], column: str) -> Any:
    """One column of several Arrow tables, without a copy."""
    import pyarrow as pa

    chunks = [chunk for table in tables for chunk in table.column(column).chunks]
    return pa.chunked_array(chunks)


def is_bytes(kind: Any) -> bool:
    """True for an Arrow type that holds bytes."""
    import pyarrow.types as kinds

    return bool(
        kinds.is_binary(kind) or kinds.is_large_binary(kind) or kinds.is_fixed_size_binary(kind)
    )


def is_text(kind: Any) -> bool:
    """True for an Arrow type that holds text, as it is or through a dictionary."""
    import pyarrow.types as kinds

    if kinds.is_dictionary(kind):
        return is_text(kind.value_type)
    return bool(kinds.is_string(kind) or kinds.is_large_string(kind))
