"""Labels of Parquet rows: class names wherever they stand, and a number for each row."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from adaptive_platform.data.parquet_table import Table
from adaptive_platform.errors import DataError

__all__ = ["classes_of", "names_in", "numbered", "some"]

_SURELY_CLASSES = 100_000
"""Largest label that numbers classes even where there are fewer rows."""


def names_in(metadata: dict[bytes, bytes], label_column: str) -> tuple[str, ...] | None:
    """Class names in a schema's metadata, as the Hugging Face hub or a plain list writes them."""
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
        return tuple(str(name) for name in features[label_column]["names"])
    except (KeyError, TypeError, ValueError):
        pass
    text = metadata.get(b"class_names", b"").decode("utf-8", "replace")
    if not text:
        return None
    try:
        return tuple(str(name) for name in json.loads(text))
    except (ValueError, TypeError):
        return tuple(name.strip() for name in text.split(","))


def classes_of(named: tuple[str, ...] | None, train: Table) -> tuple[str, ...]:
    """Class names by number: those given, or what the training labels say.

    Raises:
        DataError: The labels are numbers of something else.
    """
    if named is not None:
        return named
    values = [value for value in train.labels.unique().to_pylist() if value is not None]
    if values and isinstance(values[0], str):
        return tuple(sorted(values))
    largest = max(values, default=-1)
    if largest >= max(len(train.labels), _SURELY_CLASSES):
        raise DataError(
            f"{train.field}: labels go up to {largest} in {len(train.labels)} rows, so they number "
            "something else than classes. Name the right column with data.label_column."
        )
    return tuple(str(number) for number in range(largest + 1))


def numbered(
    table: Table, classes: tuple[str, ...], named: bool
) -> tuple[NDArray[np.int64], int, dict[str, int]]:
    """Number the rows.

    Args:
        table: One part.
        classes: Class names by number.
        named: They were given, rather than read off the training labels.

    Returns:
        Class number of each row, -1 where it is left out; how many have no label; and how many
        each class name that is not in `classes`.

    Raises:
        DataError: A label is outside the classes, or a number among names.
    """
    labels = table.labels.to_pylist()
    unlabelled = sum(label is None for label in labels)
    unknown: dict[str, int] = {}
    number = {name: k for k, name in enumerate(classes)}
    numbers = np.full(len(labels), -1, dtype=np.int64)
    for row, label in enumerate(labels):
        if label is None:
            continue
        if isinstance(label, str):
            numbers[row] = number.get(label, -1)
            if label not in number:
                unknown[label] = unknown.get(label, 0) + 1
        elif not named and classes and not classes[0].isdigit():
            raise DataError(
                f"{table.field}: label {label} at {table.where(row)} is a number, the training "
                "labels are names. Write both in one way, or give data.class_names."
            )
        elif 0 <= label < len(classes):
            numbers[row] = label
        else:
            source = "class names given" if named else "classes in the training labels"
            raise DataError(
                f"{table.field}: label {label} at {table.where(row)} is outside 0 to "
                f"{len(classes) - 1}, since there are {len(classes)} {source}. Labels count from "
                "0; mend the labels or data.class_names."
            )
    return numbers, unlabelled, unknown


def some(names: Sequence[str]) -> str:
    """The first few names, for messages."""
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
