"""Writers of small image sets on disk and in Parquet."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from coloured_pictures import jpeg


@pytest.fixture
def write_folder() -> Callable[..., Path]:
    """Write class folders: `{class name: number of images}`."""

    def write(root: Path, counts: dict[str, int], size: tuple[int, int] = (32, 32)) -> Path:
        for label, (name, count) in enumerate(counts.items()):
            (root / name).mkdir(parents=True, exist_ok=True)
            for index in range(count):
                (root / name / f"{index:03d}.jpg").write_bytes(jpeg(label, index, size))
        return root

    return write


@pytest.fixture
def write_parquet() -> Callable[..., Path]:
    """Write rows of (encoded image, label); with `struct` the image column is {bytes, path}."""

    def write(
        path: Path,
        rows: list[tuple[bytes | None, Any]],
        struct: bool = True,
        metadata: dict[str, str] | None = None,
        label_type: pa.DataType | None = None,
        group: int = 4,
    ) -> Path:
        images: list[Any] = [image for image, _ in rows]
        if struct:
            images = [{"bytes": image, "path": f"{k}.jpg"} for k, image in enumerate(images)]
            kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        else:
            kind = pa.binary()
        table = pa.table(
            {
                "image": pa.array(images, kind),
                "label": pa.array([label for _, label in rows], label_type),
                "other": pa.array(np.zeros(len(rows))),
            }
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table.replace_schema_metadata(metadata), path, row_group_size=group)
        return path

    return write


@pytest.fixture
def damage() -> Callable[[Path], list[Path]]:
    """Make three files of a class folder unreadable: cut in half, empty, and text."""

    def spoil(folder: Path) -> list[Path]:
        cut, empty, text = sorted(folder.iterdir())[:3]
        cut.write_bytes(cut.read_bytes()[: cut.stat().st_size // 2])
        empty.write_bytes(b"")
        text.write_text("this is not an image")
        return [cut, empty, text]

    return spoil
