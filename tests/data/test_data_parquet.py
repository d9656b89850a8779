import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from coloured_pictures import jpeg

from adaptive_platform.data.parquet import ParquetConfig
from adaptive_platform.errors import DataError

ROWS = [(jpeg(k % 3, k), k % 3) for k in range(9)]


def labels_of(samples):
    return [samples[k][1] for k in range(len(samples))]


@pytest.mark.parametrize("struct", [True, False])
def test_both_shapes_of_the_image_column(tmp_path, write_parquet, struct):
    path = write_parquet(tmp_path / "t.parquet", ROWS, struct=struct)
    source = ParquetConfig(train=str(path)).open()
    assert labels_of(source.train) == [k % 3 for k in range(9)]
    assert source.train.image_size == 32
    assert source.classes == ("0", "1", "2")
    for k in range(9):
        brightest = np.asarray(source.train[k][0]).mean((0, 1)).argmax()
        assert brightest == k % 3, "image and label belong together"


def test_class_names_from_the_hub_from_a_list_and_from_the_option(tmp_path, write_parquet):
    names = ["red", "green", "blue"]
    hub = json.dumps({"info": {"features": {"label": {"names": names, "_type": "ClassLabel"}}}})
    for k, metadata in enumerate(
        [
            {"huggingface": hub},
            {"class_names": "red, green, blue"},
            {"class_names": json.dumps(names)},
        ]
    ):
        path = write_parquet(tmp_path / f"{k}.parquet", ROWS, metadata=metadata)
        assert ParquetConfig(train=str(path)).open().classes == tuple(names)
        chosen = ParquetConfig(train=str(path), class_names=("a", "b", "c", "d")).open()
        assert chosen.classes == ("a", "b", "c", "d")


def test_other_class_names_in_the_held_out_part_are_refused(tmp_path, write_parquet):
    train = write_parquet(tmp_path / "t.parquet", ROWS, metadata={"class_names": "a,b,c"})
    held_out = write_parquet(tmp_path / "e.parquet", ROWS, metadata={"class_names": "c,b,a"})
    with pytest.raises(DataError, match=r"class names \(c, b, a\) are not those of .*\(a, b, c\)"):
        ParquetConfig(train=str(train), eval=str(held_out)).open()
    chosen = ParquetConfig(train=str(train), eval=str(held_out), class_names=("x", "y", "z"))
    assert chosen.open().classes == ("x", "y", "z")


def test_text_labels_are_numbered_by_name_and_unknown_ones_counted(tmp_path, write_parquet):
    names = ["dog", "ant", "cat"]
    train = write_parquet(tmp_path / "t.parquet", [(image, names[k]) for image, k in ROWS])
    held_out = write_parquet(
        tmp_path / "e.parquet", [(ROWS[0][0], name) for name in ("cat", "cow", "dog", "cow")]
    )
    source = ParquetConfig(train=str(train), eval=str(held_out)).open()
    assert source.classes == ("ant", "cat", "dog")
    assert labels_of(source.train) == [2, 0, 1] * 3
    assert labels_of(source.eval) == [1, 2]
    assert source.eval.where(1).endswith("e.parquet row 2")
    assert source.notes == ("data.eval: left out 2 rows of classes not in training: cow",)


def test_rows_without_label_are_left_out_and_counted(tmp_path, write_parquet):
    rows = [(image, None if k == 1 else label) for k, (image, label) in enumerate(ROWS)]
    source = ParquetConfig(train=str(write_parquet(tmp_path / "t.parquet", rows))).open()
    assert labels_of(source.train) == [0, 2, 0, 1, 2, 0, 1, 2]
    assert source.notes == ("data.train: left out 1 rows without a label",)


def test_first_rows_across_files_and_row_groups(tmp_path, write_parquet):
    write_parquet(tmp_path / "set" / "part-1.parquet", ROWS, group=2)
    write_parquet(tmp_path / "set" / "part-0.parquet", ROWS[:4], group=3)
    (tmp_path / "set" / "README.md").write_text("not data")
    whole = ParquetConfig(train=str(tmp_path / "set")).open().train
    assert len(whole) == 13
    assert whole.where(3).endswith("part-0.parquet row 3")
    assert whole.where(4).endswith("part-1.parquet row 0")
    for limit in (1, 3, 4, 5, 7, 13, 50):
        some = ParquetConfig(train=str(tmp_path / "set"), limit=limit).open().train
        assert labels_of(some) == labels_of(whole)[:limit]


def test_large_data_is_refused_early_or_mapped_from_a_copy(tmp_path, write_parquet):
    generator = np.random.default_rng(0)
    rows = [(jpeg(0, 0) + generator.bytes(400_000), k % 3) for k in range(6)]
    path = write_parquet(tmp_path / "t.parquet", rows, group=2)
    with pytest.raises(DataError, match=r"2 MB .*memory_limit_mb = 1.*cache_dir.*data.limit"):
        ParquetConfig(train=str(path), memory_limit_mb=1).open()
    assert len(ParquetConfig(train=str(path), memory_limit_mb=1, limit=2).open().train) == 2
    cache = tmp_path / "cache"
    config = ParquetConfig(train=str(path), memory_limit_mb=1, cache_dir=str(cache))
    in_memory = ParquetConfig(train=str(path)).open().train
    for _ in range(2):
        mapped = config.open().train
        assert labels_of(mapped) == labels_of(in_memory)
        assert mapped[3][0].tobytes() == in_memory[3][0].tobytes()
        assert len(list(cache.iterdir())) == 1, "one copy, no leftovers"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"image_column": "picture"},
            r"data.image_column = picture: .*no such column.*label, other",
        ),
        ({"label_column": "class"}, r"data.label_column = class: .*no such column"),
        ({"image_column": "other"}, r"data.image_column = other: .*double.*bytes"),
        ({"label_column": "other"}, r"data.label_column = other: .*double.*integers or strings"),
        ({"class_names": ("a", "b")}, r"label 2 at .*t.parquet row 2 is outside 0 to 1"),
    ],
)
def test_wrong_columns_and_labels_are_named(tmp_path, write_parquet, options, message):
    path = write_parquet(tmp_path / "t.parquet", ROWS)
    with pytest.raises(DataError, match=message):
        ParquetConfig(train=str(path), **options).open()


def test_wrong_label_ranges_are_refused(tmp_path, write_parquet):
    negative = write_parquet(tmp_path / "n.parquet", [(ROWS[0][0], 0), (ROWS[1][0], -1)])
    with pytest.raises(DataError, match=r"label -1 at .*n.parquet row 1"):
        ParquetConfig(train=str(negative)).open()
    train = write_parquet(tmp_path / "t.parquet", ROWS)
    beyond = write_parquet(tmp_path / "e.parquet", [(ROWS[0][0], 3)])
    with pytest.raises(DataError, match=r"data.eval: label 3 .*3 classes in the training labels"):
        ParquetConfig(train=str(train), eval=str(beyond)).open()


def test_missing_empty_and_foreign_files_are_refused_with_their_path(tmp_path, write_parquet):
    def refused(path, message):
        with pytest.raises(DataError, match=message) as caught:
            ParquetConfig(train=str(path)).open()
        assert str(path) in str(caught.value)

    refused(tmp_path / "absent.parquet", "does not exist")
    (tmp_path / "folder").mkdir()
    refused(tmp_path / "folder", r"no \*.parquet file")
    (tmp_path / "text.parquet").write_text("no, no parquet")
    refused(tmp_path / "text.parquet", "not a readable Parquet file")
    schema = pa.schema([("image", pa.binary()), ("label", pa.int64())])
    pq.write_table(schema.empty_table(), tmp_path / "none.parquet")
    refused(tmp_path / "none.parquet", "no rows")
    unlabelled = write_parquet(tmp_path / "u.parquet", [(ROWS[0][0], None)], label_type=pa.int64())
    refused(unlabelled, "no row has a usable label")
    refused(write_parquet(tmp_path / "b.parquet", [(b"x", 0), (None, 1)]), "none of 2 rows tried")


def test_numbers_are_not_taken_for_positions_among_names(tmp_path, write_parquet):
    names = ["dog", "cat", "cow"]
    train = write_parquet(tmp_path / "t.parquet", [(image, names[k]) for image, k in ROWS])
    held_out = write_parquet(tmp_path / "e.parquet", ROWS)
    with pytest.raises(DataError, match="is a number, the training labels are names"):
        ParquetConfig(train=str(train), eval=str(held_out)).open()


def test_a_column_of_ids_is_no_label(tmp_path, write_parquet):
    rows = [(image, k + 30_000_000) for image, k in ROWS]
    path = write_parquet(tmp_path / "t.parquet", rows)
    with pytest.raises(DataError, match=r"labels go up to 30000002 in 9 rows.*label_column"):
        ParquetConfig(train=str(path)).open()
