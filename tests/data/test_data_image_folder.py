import os

import pytest
import torch
from PIL import Image

from adaptive_platform.data import evaluation_batches
from adaptive_platform.data.image_folder import ImageFolderConfig
from adaptive_platform.errors import DataError


def test_endings_in_any_case_are_used_and_the_rest_counted_in_one_message(tmp_path):
    folder = tmp_path / "train" / "thing"
    folder.mkdir(parents=True)
    image = Image.new("RGB", (16, 16), (9, 9, 9))
    for name, form in [
        ("a.JPG", "JPEG"), ("b.JPEG", "JPEG"), ("c.Png", "PNG"), ("d.webp", "WEBP"),
        ("e.tif", "TIFF"), ("f", "PNG"), ("._h.jpg", "JPEG"),
    ]:  # fmt: skip
        image.save(folder / name, form)
    (folder / "g.jpg.txt").write_text("notes")
    (folder / "Thumbs.db").write_bytes(b"\0")
    source = ImageFolderConfig(train=str(tmp_path / "train")).open()
    names = [source.train.where(k).rsplit("/", 1)[1] for k in range(len(source.train))]
    assert names == ["a.JPG", "b.JPEG", "c.Png", "d.webp", "e.tif"]
    assert source.notes == (
        "data.train: left out 4 files that are not usable images: "
        "1 .db, 1 .txt, 1 hidden, 1 without ending",
    )


def test_class_numbers_come_from_the_training_folders(tmp_path, write_folder):
    train = write_folder(tmp_path / "train", {"a": 2, "b": 2, "c": 2})
    held_out = write_folder(tmp_path / "val", {"a": 1, "b": 0, "c": 3, ".hidden": 2, "d": 4})
    config = ImageFolderConfig(train=str(train), eval=str(held_out))
    source = config.open()
    assert source.classes == ("a", "b", "c")
    targets = torch.cat([b.targets for b in evaluation_batches(source.eval, config, 0, 1, 8)])
    assert targets.tolist() == [0, 2, 2, 2]
    assert source.notes == (
        f"data.eval: class b has no images in {held_out}",
        "data.eval: class folder d is not among the training classes; its 4 images are left out",
    )


def test_an_empty_or_absent_training_class_keeps_its_number(tmp_path, write_folder):
    train = write_folder(tmp_path / "train", {"a": 1, "b": 0, "c": 1})
    source = ImageFolderConfig(train=str(train)).open()
    assert [source.train[k][1] for k in range(2)] == [0, 2]
    assert "class b has no images" in source.notes[0]


def test_nested_folders_belong_to_their_class(tmp_path, write_folder):
    write_folder(tmp_path / "train" / "a", {"morning": 2, "evening": 1})
    source = ImageFolderConfig(train=str(tmp_path / "train")).open()
    assert (source.classes, len(source.train)) == (("a",), 3)


def test_unusable_folders_are_errors_with_path_and_fix(tmp_path, write_folder):
    def refused(path, message):
        with pytest.raises(DataError, match=message) as caught:
            ImageFolderConfig(train=str(path)).open()
        assert str(path) in str(caught.value)

    refused(tmp_path / "absent", "does not exist")
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file", "is not a folder")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "no class folders")
    (tmp_path / "hollow" / "a").mkdir(parents=True)
    refused(tmp_path / "hollow", "no usable image")
    (tmp_path / "fake" / "a").mkdir(parents=True)
    (tmp_path / "fake" / "a" / "x.jpg").write_text("text")
    refused(tmp_path / "fake", r"no usable image in 1 class folders \(1 files")
    train = write_folder(tmp_path / "train", {"a": 1})
    with pytest.raises(DataError, match=r"data\.eval"):
        ImageFolderConfig(train=str(train), eval=str(tmp_path / "hollow")).open()


def test_paths_are_absolute_and_remote_ones_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert ImageFolderConfig(train="photos").train == str(tmp_path / "photos")
    with pytest.raises(ValueError, match="local or mounted"):
        ImageFolderConfig(train="s3://bucket/photos")


def test_links_in_a_circle_count_nothing_twice(tmp_path, write_folder):
    root = write_folder(tmp_path / "train", {"a": 2, "b": 1})
    (tmp_path / "train" / "a" / "loop").symlink_to(tmp_path / "train" / "a")
    os.mkfifo(tmp_path / "train" / "a" / "pipe.png")
    source = ImageFolderConfig(train=str(root)).open()
    assert len(source.train) == 3
    assert any("no regular file" in note for note in source.notes)


def test_images_beside_the_class_folders_are_told(tmp_path, write_folder):
    root = write_folder(tmp_path / "train", {"a": 2, "b": 1})
    (tmp_path / "train" / "stray.png").write_bytes(b"")
    source = ImageFolderConfig(train=str(root)).open()
    assert any("1 beside the class folders" in note for note in source.notes), source.notes
