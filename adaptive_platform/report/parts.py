"""One table of a run as a folder of Parquet parts: append, cut off after a step, merge, read.

A part is `part-FIRST-LAST-STEP.parquet`: the first and last append that it holds, and the step of
its first row. Sorted names give the order of writing; each writer leaves a gap to those before it.
A merged part covers the parts it was made of, so where a merge was killed before it removed them,
they are known to be superseded.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

from adaptive_platform.storage import is_hidden, join, write_bytes

__all__ = ["Part", "PartTable", "arrow_schema", "live_parts", "read_table"]

_NAME = re.compile(r"^part-(?P<first>\d+)-(?P<last>\d+)-(?P<step>\d+)\.parquet$")

_READ_ATTEMPTS = 5
_TERM = 1000
"""Each writer begins at the next multiple. One that stood still, was taken for lost and wakes while
another writes may finish the part it was at; it must not take the place of the other's."""


@dataclass(frozen=True, slots=True, order=True)
class Part:
    """Name of a part, taken apart."""

    first: int
    """First append that the part holds."""
    last: int
    """Last append that the part holds."""
    step: int
    """`step` of its first row."""

    @property
    def name(self) -> str:
        """File name; sorted names give the order of writing."""
        return f"part-{self.first:08d}-{self.last:08d}-{self.step:010d}.parquet"

    @property
    def span(self) -> int:
        """Appends that the part has numbers for."""
        return self.last - self.first + 1


def arrow_schema(record: type) -> Any:
    """Arrow schema of a record dataclass, so that empty and all-None columns keep their types."""
    import pyarrow as pa

    types = {
        "int": pa.int64(),
        "float": pa.float64(),
        "float | None": pa.float64(),
        "bool": pa.bool_(),
        "str": pa.string(),
        "list[list[int]] | None": pa.list_(pa.list_(pa.int64())),
    }
    return pa.schema([pa.field(f.name, types[str(f.type)]) for f in fields(record)])


def live_parts(system: Any, folder: str) -> tuple[list[Part], list[str]]:
    """Parts that hold the table, in order, and names that may be removed.

    The names are temporary files and parts that a merged part covers.
    """
    from pyarrow import fs

    found, stale = [], []
    for info in system.get_file_info(fs.FileSelector(folder, allow_not_found=True)):
        match = _NAME.match(info.base_name)
        if match:
            found.append(Part(*(int(match[name]) for name in ("first", "last", "step"))))
        elif is_hidden(info.base_name) and info.base_name.endswith(".tmp"):
            stale.append(info.base_name)
    live: list[Part] = []
    for part in sorted(found, key=lambda part: (part.first, -part.last)):
        if live and part.last <= live[-1].last:
            stale.append(part.name)
        else:
            live.append(part)
    return live, stale


def read_table(system: Any, folder: str, schema: Any) -> Any:
    """All rows in the order of writing, with the columns of `schema` (null where a part has none).

    Columns that only the parts have are kept: newer versions may add some.
    """
    import pyarrow as pa

    for attempt in range(_READ_ATTEMPTS):
        live, _ = live_parts(system, folder)
        try:
            tables = [_read_part(system, join(folder, part.name)) for part in live]
        except FileNotFoundError:
            # The run is going on and merged parts after we had listed them: list them again.
            if attempt == _READ_ATTEMPTS - 1:
                raise
        else:
            break
    return pa.concat_tables([schema.empty_table(), *tables], promote_options="default")


def _read_part(system: Any, path: str, schema: Any = None) -> Any:
    """Rows of one part; with `schema` exactly its columns, null where the part has none."""
    import pyarrow.parquet as pq

    with system.open_input_file(path) as file:
        return pq.read_table(file, schema=schema)


class PartTable:
    """Writer of one table. There must be only one at a time for a folder.

    Args:
        system: A pyarrow file system.
        folder: Where the parts lie; made where it is missing.
        record: Dataclass of the rows; it has a field `step`.
        fan_in: So many parts of like size are merged into one.
        largest: Parts that hold so many appends are left alone. With the defaults a table never
            has more than 62 parts and one for each 1,024 appends.

    Raises:
        OSError: The folder can't be made or read, or leftovers can't be removed.
    """

    def __init__(
        self, system: Any, folder: str, record: type, *, fan_in: int = 32, largest: int = 1024
    ) -> None:
        self._system = system
        self._folder = folder
        self._schema = arrow_schema(record)
        self._fan_in = fan_in
        self._largest = largest
        self.damaged: list[str] = []
        """Parts that could not be read (power was lost while one was written) and are set aside."""
        system.create_dir(folder, recursive=True)
        self._parts, stale = live_parts(system, folder)
        self._remove(stale)
        self._next = (self._parts[-1].last // _TERM + 1) * _TERM if self._parts else 0

    @property
    def num_parts(self) -> int:
        """Files that hold the table."""
        return len(self._parts)

    def append(self, rows: Sequence[Any]) -> None:
        """Publish rows as one new part, then merge where enough small parts have gathered.

        Raises:
            OSError: The storage refused; none of the rows is in the table.
        """
        import pyarrow as pa

        columns = [
            pa.array([getattr(row, column.name) for row in rows], type=column.type)
            for column in self._schema
        ]
        part = Part(self._next, self._next, max(0, rows[0].step) if rows else 0)
        self._publish(part, pa.Table.from_arrays(columns, schema=self._schema))
        self._parts.append(part)
        self._next += 1
        try:
            self._merge()
        except OSError:
            # The rows are safe and the folder is consistent; the next append tries again.
            with suppress(OSError):
                self._parts, _ = live_parts(self._system, self._folder)

    def truncate(self, last_step: int, *, skipped: int = 0, epoch: int | None = None) -> None:
        """Remove the rows of what comes after a position, which is made again.

        Args:
            last_step: Committed steps; rows with a greater `step` go.
            skipped: Steps that were skipped since then: so many of their rows, which carry the next
                number, stay.
            epoch: Rows of `last_step` itself go where they are of a later epoch; None: they stay.

        Raises:
            OSError: The storage refused; some of the rows may still be there.
        """
        import numpy as np
        import pyarrow as pa
        import pyarrow.compute as pc

        end = []  # parts and their rows, from the newest back to the first that stays as it is
        for part in reversed(self._parts[:]):
            beyond = part.step > last_step + 1
            table = self._schema.empty_table() if beyond else self._read(part)
            if table is None:
                continue
            end.append((part, table))
            # Steps never fall from row to row, so what is before stays.
            if table.num_rows and table["step"][0].as_py() < last_step:
                break
        cut = []
        for part, table in reversed(end):
            step = table["step"].to_numpy()
            stays = step <= last_step
            if epoch is not None:
                stays &= (step < last_step) | (table["epoch"].to_numpy() <= epoch)
            if skipped:
                dropped = pc.fill_null(table["skipped"], False).to_numpy()
                next_ones = np.flatnonzero((step == last_step + 1) & dropped)[:skipped]
                stays[next_ones] = True
                skipped -= len(next_ones)
            cut.append((part, table, stays))
        for part, table, stays in reversed(cut):
            if not stays.any():
                self._remove([part.name])
                self._parts.remove(part)
            elif not stays.all():
                self._publish(part, table.filter(pa.array(stays)))

    def _merge(self) -> None:
        """Merge the newest `fan_in` parts of like size, as long as there are such."""
        import pyarrow as pa

        while len(self._parts) >= self._fan_in:
            group = self._parts[-self._fan_in :]
            if self._level(group[0]) != self._level(group[-1]) or group[0].span >= self._largest:
                return
            merged = Part(group[0].first, group[-1].last, group[0].step)
            tables = [table for table in map(self._read, group) if table is not None]
            self._publish(merged, pa.concat_tables([self._schema.empty_table(), *tables]))
            self._remove([part.name for part in group if part in self._parts])
            self._parts = [*(part for part in self._parts if part not in group), merged]

    def _level(self, part: Part) -> int:
        level, span = 0, part.span
        while span >= self._fan_in:
            level, span = level + 1, span // self._fan_in
        return level

    def _publish(self, part: Part, table: Any) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        sink = pa.BufferOutputStream()
        pq.write_table(table, sink)
        write_bytes(self._system, join(self._folder, part.name), sink.getvalue().to_pybytes())

    def _read(self, part: Part) -> Any | None:
        """Rows of a part. One that is damaged is renamed, so that nobody reads it: None."""
        from pyarrow import ArrowInvalid

        path = join(self._folder, part.name)
        try:
            return _read_part(self._system, path, self._schema)
        except ArrowInvalid:
            self._system.move(path, join(self._folder, f"_damaged-{part.name}"))
            self._parts.remove(part)
            self.damaged.append(part.name)
            return None

    def _remove(self, names: Sequence[str]) -> None:
        for name in names:
            self._system.delete_file(join(self._folder, name))
