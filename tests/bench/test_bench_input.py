"""The benchmark of the input, on a few small pictures."""

from __future__ import annotations

import pytest
from PIL import Image
from typer.testing import CliRunner

from adaptive_platform.bench.input import input_pipeline
from adaptive_platform.bench.pictures import class_folders, make_pictures
from adaptive_platform.cli import app
from adaptive_platform.errors import DataError


def test_a_flat_folder_is_measured_with_what_cannot_be_read_left_out(tmp_path):
    make_pictures(str(tmp_path), 6, sizes=[(90, 70), (500, 470)])
    (tmp_path / "cut.jpg").write_bytes((tmp_path / "00000.jpg").read_bytes()[:200])
    Image.new("CMYK", (30, 40)).save(tmp_path / "print.jpg", "JPEG")
    rows, notes = input_pipeline(quick=True, data=str(tmp_path))
    cases = {row.case: row for row in rows}
    dali = any("DALI" in case for case in cases)
    assert dali != any("DALI is left out" in note for note in notes)
    assert cases[f"files: {tmp_path}"].value == 7
    for case in (
        "training: file to normalized",
        "training: file to normalized, never reduced",
        "evaluation: file to normalized",
        "training: images per core",
        "decoding whole files",
    ):
        assert cases[case].repeats == 3
        assert cases[case].value > 0
    reads = cases["two epochs with a cache: reads of storage"]
    assert (reads.value, reads.baseline) == (7, 14)
    assert cases["two epochs with a cache: held in memory"].value > 0
    assert cases["difference from Pillow, whole (6 pictures): largest"].value <= 1
    assert any(case.startswith("waiting in a step") for case in cases)


def test_made_pictures_are_said_to_be_made_and_are_as_large_as_photographs(tmp_path):
    root, what = class_folders("", str(tmp_path), 3)
    assert "not real" in what
    files = sorted((tmp_path / "made").iterdir())
    assert len(files) == 3
    assert root == str(tmp_path)
    for path in files:
        with Image.open(path) as picture:
            pixels = picture.width * picture.height
        assert 0.3 < path.stat().st_size / pixels < 1.2, "bytes per pixel; ImageNet's have 0.6"


def test_a_missing_folder_is_an_error_and_so_is_one_without_pictures(tmp_path):
    with pytest.raises(DataError, match="is no folder"):
        input_pipeline(quick=True, data=str(tmp_path / "absent"))
    result = CliRunner().invoke(app, ["bench", "input", "--data", str(tmp_path)])
    assert isinstance(result.exception, DataError)
    assert "no usable image" in str(result.exception)
