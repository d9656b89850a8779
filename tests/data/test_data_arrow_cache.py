import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from adaptive_platform.data.arrow_cache import mapped_copy

TABLE = pa.table({"a": [1, 2, 3, 4, 5], "b": ["v", "w", "x", "y", "z"], "c": [0.0] * 5})


def test_the_rows_and_columns_asked_for(tmp_path):
    pq.write_table(TABLE, tmp_path / "t.parquet", row_group_size=2)
    copy = mapped_copy(str(tmp_path / "t.parquet"), [0, 1], 3, ["b", "a"], str(tmp_path / "c"))
    assert copy.to_pydict() == {"b": ["v", "w", "x"], "a": [1, 2, 3]}


def test_a_copy_is_used_again_and_a_changed_file_gets_another(tmp_path):
    path, folder = tmp_path / "t.parquet", tmp_path / "c"
    pq.write_table(TABLE, path)
    arguments = (str(path), [0], 5, ["a"], str(folder))
    mapped_copy(*arguments)
    (first,) = folder.iterdir()
    written = first.stat().st_mtime_ns
    mapped_copy(*arguments)
    assert first.stat().st_mtime_ns == written
    pq.write_table(TABLE.slice(1), path)
    os.utime(path, ns=(1, 1))
    assert mapped_copy(*arguments).to_pydict() == {"a": [2, 3, 4, 5]}
    assert len(list(folder.iterdir())) == 2


def test_a_failed_copy_leaves_nothing_behind(tmp_path, monkeypatch):
    pq.write_table(TABLE, tmp_path / "t.parquet")

    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        mapped_copy(str(tmp_path / "t.parquet"), [0], 5, ["a"], str(tmp_path / "c"))
    assert list((tmp_path / "c").iterdir()) == []
