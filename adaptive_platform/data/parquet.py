"""Reader `parquet`: image sets as hubs ship them, encoded images and labels in columns."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from adaptive_platform.data.arrow_cache import mapped_copy
from adaptive_platform.data.images import BrokenImageError, common_size
from adaptive_platform.data.parquet_labels import classes_of, names_in, numbered, some
from adaptive_platform.data.parquet_table import (
    Table,
    group_bytes,
    is_bytes,
    is_text,
    joined,
    needed_groups,
    parquet_files,
)
from adaptive_platform.data.samples import EncodedImages
from adaptive_platform.data.sources import DataPath, DataSource, EncodedDataConfig
from adaptive_platform.errors import DataError

__all__ = ["ParquetConfig"]

_PROBES = 32


class ParquetConfig(EncodedDataConfig):
    """Parquet files with an image column, {bytes, path} or bytes, and a label column.

    Labels are class numbers or class names. Class names come from `class_names`, else from the
    file's schema metadata (`huggingface`, or `class_names`), else from the training labels: names
    in alphabetical order, or the numbers themselves. Rows without a label, and held-out rows whose
    class name training does not have, are left out and counted.
    """

    kind: Literal["parquet"] = "parquet"
    train: DataPath
    """A Parquet file, or a folder whose *.parquet files are read in order of their names."""
    eval: DataPath | None = None
    """The same for held-out rows; None where there are none."""
    image_column: str = "image"
    """Column of the images."""
    label_column: str = "label"
    """Column of the labels."""
    class_names: tuple[str, ...] | None = None
    """Class names by number, instead of those in the file."""
    limit: int | None = Field(default=None, ge=1)
    """Use only the first rows of `train`; None for all."""
    eval_limit: int | None = Field(default=None, ge=1)
    """Use only the first rows of `eval`; None for all."""
    memory_limit_mb: int = Field(default=1024, ge=1)
    """Largest size (MB, per training worker) of a part that is held in memory."""
    cache_dir: DataPath | None = None
    """Folder for copies that are mapped into memory instead of loaded, for parts larger than
    `memory_limit_mb`; needs as much free disk as the data has bytes."""

    def open(self) -> DataSource:
        """Read schema and labels, and load or map the images.

        Raises:
            DataError: A path, column or label is missing or of the wrong kind, or the data is too
                large for memory and there is no `cache_dir`.
        """
        train = self._read("data.train", self.train, self.limit)
        held_out = None
        if self.eval is not None:
            held_out = self._read("data.eval", self.eval, self.eval_limit)
        named = self.class_names or train.class_names
        classes = classes_of(named, train)
        other = held_out.class_names if held_out else None
        if self.class_names is None and other is not None and other != classes:
            raise DataError(
                f"data.eval = {self.eval}: its class names ({some(other)}) are not those of "
                f"data.train ({some(classes)}), so the numbers mean other classes. Give "
                "data.class_names if they are the same."
            )
        notes: list[str] = []
        parts = [
            self._samples(part, classes, named is not None, notes) if part else None
            for part in (train, held_out)
        ]
        assert parts[0] is not None
        return DataSource(train=parts[0], eval=parts[1], classes=classes, notes=tuple(notes))

    def _read(self, field: str, path: str, limit: int | None) -> Table:
        import pyarrow as pa
        import pyarrow.parquet as pq

        columns = [self.image_column, self.label_column]
        plan, class_names, total_bytes = self._plan(field, path, limit)
        in_memory = total_bytes <= self.memory_limit_mb * 10**6
        if not in_memory and self.cache_dir is None:
            raise DataError(
                f"{field} = {path}: {total_bytes / 1e6:.0f} MB of images, more than "
                f"data.memory_limit_mb = {self.memory_limit_mb}. Raise it, set data.cache_dir to a "
                "folder with that much free space, or read fewer rows with data.limit."
            )
        tables = []
        try:
            for name, groups, rows in plan:
                if in_memory:
                    with pq.ParquetFile(name) as opened:
                        table = opened.read_row_groups(groups, columns=columns)
                    tables.append(table.slice(0, rows))
                else:
                    assert self.cache_dir is not None
                    tables.append(mapped_copy(name, groups, rows, columns, self.cache_dir))
            images = joined(tables, self.image_column)
            labels = joined(tables, self.label_column)
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{field} = {path}: can't be read ({error}).") from error
        return Table(
            field=field,
            files=[name for name, _, _ in plan],
            starts=np.cumsum([0] + [len(table) for table in tables]).tolist(),
            images=images,
            labels=labels,
            class_names=class_names,
        )

    def _plan(
        self, field: str, path: str, limit: int | None
    ) -> tuple[list[tuple[str, list[int], int]], tuple[str, ...] | None, int]:
        """Look at the headers of the files.

        Returns:
            File, row groups and rows to use of each; class names of the first; bytes to hold.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        columns = [self.image_column, self.label_column]
        plan: list[tuple[str, list[int], int]] = []
        class_names = None
        total_bytes, missing = 0, limit
        for name in parquet_files(field, path):
            try:
                opened = pq.ParquetFile(name)
            except (OSError, pa.ArrowException) as error:
                raise DataError(
                    f"{field} = {name}: not a readable Parquet file ({error})."
                ) from error
            with opened:
                schema = opened.schema_arrow
                self._check_schema(field, name, schema)
                if not plan:
                    class_names = names_in(schema.metadata or {}, self.label_column)
                groups, rows = needed_groups(opened.metadata, missing)
                total_bytes += sum(group_bytes(opened.metadata, g, columns) for g in groups)
            plan.append((name, groups, rows))
            if missing is not None:
                missing -= rows
                if missing == 0:
                    break
        if not sum(rows for _, _, rows in plan):
            raise DataError(f"{field} = {path}: there are no rows in it. Name another file.")
        return plan, class_names, total_bytes

    def _check_schema(self, field: str, name: str, schema: Any) -> None:
        import pyarrow.types as kinds

        for option, column in (
            ("image_column", self.image_column),
            ("label_column", self.label_column),
        ):
            if column not in schema.names:
                raise DataError(
                    f"data.{option} = {column}: {name} has no such column. It has: "
                    f"{', '.join(schema.names)}."
                )
        image = schema.field(self.image_column).type
        if kinds.is_struct(image):
            inner = {image.field(k).name: image.field(k).type for k in range(image.num_fields)}
            good = "bytes" in inner and is_bytes(inner["bytes"])
        else:
            good = is_bytes(image)
        if not good:
            raise DataError(
                f"data.image_column = {self.image_column}: {name} holds {image} there, expected "
                "encoded images as bytes or as {bytes, path}. Name another column."
            )
        label = schema.field(self.label_column).type
        if not (kinds.is_integer(label) or is_text(label)):
            raise DataError(
                f"data.label_column = {self.label_column}: {name} holds {label} there, expected "
                "integers or strings. Name another column."
            )

    def _samples(
        self, table: Table, classes: tuple[str, ...], named: bool, notes: list[str]
    ) -> _ParquetImages:
        """Number the labels of one part, leave out rows that have none, and say so."""
        numbers, unlabelled, unknown = numbered(table, classes, named)
        if unlabelled:
            notes.append(f"{table.field}: left out {unlabelled} rows without a label")
        if unknown:
            total = sum(unknown.values())
            names = ", ".join(sorted(unknown))
            notes.append(
                f"{table.field}: left out {total} rows of classes not in training: {names}"
            )
        rows = np.flatnonzero(numbers >= 0)
        if not len(rows):
            raise DataError(
                f"{table.field} = {table.files[0]}: no row has a usable label. Check "
                f"data.label_column = {self.label_column}."
            )
        samples = _ParquetImages(table, rows, numbers[rows], self.background)
        chosen = rows[:: max(1, len(rows) // _PROBES)]
        samples.image_size, readable = common_size([table.encoded(int(row)) for row in chosen])
        if not readable:
            raise DataError(
                f"{table.field} = {table.files[0]}: none of {len(chosen)} rows tried holds an "
                f"image that can be opened. Check data.image_column = {self.image_column}."
            )
        return samples


class _ParquetImages(EncodedImages):
    def __init__(
        self,
        table: Table,
        rows: NDArray[np.int64],
        labels: NDArray[np.int64],
        background: tuple[int, int, int],
    ) -> None:
        self._table = table
        self._rows = rows
        self._labels = labels
        self.background = background

    def __len__(self) -> int:
        return len(self._rows)

    def encoded(self, index: int) -> bytes:
        try:
            return self._table.encoded(int(self._rows[index]))
        except OSError as error:
            raise BrokenImageError(str(error)) from error

    def label(self, index: int) -> int:
        return int(self._labels[index])

    def where(self, index: int) -> str:
        return self._table.where(int(self._rows[index]))
