"""Reader `image_folder`: one folder per class, as in `train/cat/1.jpg`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from adaptive_platform.data.images import IMAGE_EXTENSIONS, BrokenImageError, common_size
from adaptive_platform.data.samples import EncodedImages
from adaptive_platform.data.sources import DataPath, DataSource, EncodedDataConfig
from adaptive_platform.errors import DataError

__all__ = ["ImageFolderConfig"]

_PROBES = 32


class ImageFolderConfig(EncodedDataConfig):
    """Images in class folders, nested ones included.

    Classes are numbered by the names of the training folders in alphabetical order; an empty one
    keeps its number. Hidden files and folders are ignored; other files that are not images by their
    ending are left out and counted by kind. Held-out folders without a training folder of the same
    name are left out and counted.
    """

    kind: Literal["image_folder"] = "image_folder"
    train: DataPath
    """Folder that holds one folder of images per class."""
    eval: DataPath | None = None
    """The same for held-out images; None where there are none."""
    cache_mib: int = Field(default=0, ge=0)
    """Encoded training images that each training worker keeps in memory over epochs, at most, in
    MiB; 0 for none. Workers share them: together they need as much as the files, and each file is
    read once."""

    @property
    def cache_limit_mib(self) -> int:
        """The field `cache_mib`."""
        return self.cache_mib

    def open(self) -> DataSource:
        """List the files and look into a few of them.

        Raises:
            DataError: A folder is missing, or has no classes or no usable image.
        """
        classes = _class_folders("data.train", self.train)
        train, notes = self._part("data.train", self.train, classes)
        held_out = None
        if self.eval is not None:
            found = _class_folders("data.eval", self.eval)
            held_out, more = self._part("data.eval", self.eval, classes)
            notes += more
            for name in sorted(set(found) - set(classes)):
                count = len(_images_in(os.path.join(self.eval, name), Counter()))
                notes.append(
                    f"data.eval: class folder {name} is not among the training classes; "
                    f"its {count} images are left out"
                )
        return DataSource(train=train, eval=held_out, classes=tuple(classes), notes=tuple(notes))

    def _part(
        self, field: str, root: str, classes: Sequence[str]
    ) -> tuple[_FolderImages, list[str]]:
        paths: list[str] = []
        labels: list[int] = []
        notes: list[str] = []
        others: Counter[str] = Counter()
        beside = sum(not entry.is_dir() and not _hidden(entry.name) for entry in os.scandir(root))
        if beside:
            others["beside the class folders"] = beside
        for number, name in enumerate(classes):
            found = _images_in(os.path.join(root, name), others)
            if not found:
                notes.append(f"{field}: class {name} has no images in {root}")
            paths += found
            labels += [number] * len(found)
        if others:
            kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(others.items()))
            notes.append(
                f"{field}: left out {others.total()} files that are not usable images: {kinds}"
            )
        step = max(1, len(paths) // _PROBES)
        size, readable = common_size(paths[::step])
        if not readable:
            raise DataError(
                f"{field} = {root}: no usable image in {len(classes)} class folders "
                f"({len(paths)} files with an image ending, {others.total()} others). Images end "
                f"in {' '.join(sorted(IMAGE_EXTENSIONS))}."
            )
        return _FolderImages(paths, labels, size, self.background), notes


class _FolderImages(EncodedImages):
    def __init__(
        self,
        paths: list[str],
        labels: list[int],
        image_size: int,
        background: tuple[int, int, int],
    ) -> None:
        self._paths = paths
        self._labels = labels
        self.background = background
        self.image_size = image_size

    def __len__(self) -> int:
        return len(self._paths)

    def encoded(self, index: int) -> bytes:
        try:
            with open(self._paths[index], "rb") as file:
                return file.read()
        except OSError as error:
            raise BrokenImageError(str(error)) from error

    def label(self, index: int) -> int:
        return self._labels[index]

    def where(self, index: int) -> str:
        return self._paths[index]


def _class_folders(field: str, root: str) -> list[str]:
    if not os.path.isdir(root):
        what = "is not a folder" if os.path.exists(root) else "does not exist"
        raise DataError(f"{field} = {root}: {what}. Name the folder that holds the class folders.")
    try:
        with os.scandir(root) as entries:
            names = sorted(e.name for e in entries if e.is_dir() and not _hidden(e.name))
    except OSError as error:
        raise DataError(f"{field} = {root}: can't be listed ({error.strerror}).") from error
    if not names:
        raise DataError(
            f"{field} = {root}: there are no class folders in it. Put the images of each class "
            f"into a folder named after it, such as {os.path.join(root, 'cat')}."
        )
    return names


def _images_in(folder: str, others: Counter[str]) -> list[str]:
    """Image paths under `folder`, sorted; files of other kinds are counted in `others`."""
    found = []
    visited: set[tuple[int, int]] = set()
    for parent, folders, files in os.walk(folder, followlinks=True):
        # A link to a folder above would count every image again and again.
        entry = os.stat(parent)
        if (entry.st_dev, entry.st_ino) in visited:
            folders[:] = []
            continue
        visited.add((entry.st_dev, entry.st_ino))
        folders[:] = [name for name in folders if not _hidden(name)]
        for name in files:
            ending = os.path.splitext(name)[1].lower()
            if _hidden(name):
                others["hidden"] += 1
            elif not os.path.isfile(os.path.join(parent, name)):
                others["no regular file"] += 1
            elif ending in IMAGE_EXTENSIONS:
                found.append(os.path.join(parent, name))
            else:
                others[ending or "without ending"] += 1
    return sorted(found)


def _hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"
