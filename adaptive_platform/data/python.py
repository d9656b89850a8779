"""Data sets brought from Python: `(input, label)` by index, from anything with a length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from adaptive_platform.data.images import FALLBACK_IMAGE_SIZE, BrokenImageError
from adaptive_platform.data.randomness import SampleRandomness
from adaptive_platform.data.samples import Samples
from adaptive_platform.data.sources import DataConfig, DataSource
from adaptive_platform.errors import DataError

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

__all__ = ["PythonConfig", "wrap_dataset"]

_PROBES = 8


class PythonConfig(DataConfig):
    """Says in a recipe that the data set was passed in as a Python object.

    The shared fields hold for it. PIL images are resized, augmented and normalized; tensors are
    used as they are, except that uint8 images [1 or 3, H, W] are scaled and normalized.
    """

    kind: Literal["python"] = "python"

    def open(self) -> DataSource:
        """Refuse: an object can't be found by a recipe.

        Raises:
            DataError: Always.
        """
        raise DataError(
            "data.kind = python: this run's data set was passed in from Python, so a recipe alone "
            "can't open it. Pass train_data=... (and eval_data=...) again, or choose another kind."
        )


def wrap_dataset(train: Any, eval: Any = None, classes: Sequence[str] | None = None) -> DataSource:
    """Make a `DataSource` of map-style data sets.

    A sample that raises `OSError` when read (PIL does for damaged files) counts as broken; any
    other exception is a mistake in the data set's code and is passed on.

    Args:
        train: Has `__len__` and `__getitem__`; items are `(input, label)`: input a tensor of any
            shape, a NumPy array or a PIL image; label a number or a tensor.
        eval: The same for held-out samples, or None.
        classes: Names by class number; those of `train.classes` unless given.

    Raises:
        DataError: Not map-style, empty, or items are not pairs.
    """
    names = classes if classes is not None else getattr(train, "classes", ())
    return DataSource(
        train=_Wrapped(train, "train_data"),
        eval=None if eval is None else _Wrapped(eval, "eval_data"),
        classes=tuple(str(name) for name in names),
    )


class _Wrapped(Samples):
    reads_randomly = True

    def __init__(self, dataset: Any, name: str) -> None:
        self._dataset = dataset
        self._name = name
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise DataError(
                f"{name}: {type(dataset).__name__} has no length or can't be indexed. Pass a "
                "map-style data set (with __len__ and __getitem__); an iterable one can't be "
                "shared out exactly once when the number of workers changes."
            )
        if len(dataset) == 0:
            raise DataError(f"{name}: the data set is empty. Give it at least one sample.")
        with SampleRandomness(foreign=True):
            self.image_size = self._probed_size()

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> tuple[Image.Image | Tensor, Any]:
        try:
            image, label = self._dataset[index]
            if hasattr(image, "load"):  # PIL opens lazily: a cut file shows itself only now
                image.load()
        except OSError as error:
            raise BrokenImageError(str(error) or type(error).__name__) from error
        return image, label

    def where(self, index: int) -> str:
        return f"{self._name}[{index}]"

    def _probed_size(self) -> int | None:
        """Check the form of the first items; the side of their images, None for tensors."""
        sizes = set()
        for index in range(min(_PROBES, len(self._dataset))):
            try:
                item = self._dataset[index]
            except OSError:
                continue
            if not isinstance(item, (tuple, list)) or len(item) != 2:
                raise DataError(
                    f"{self._name}[{index}]: got {type(item).__name__}, expected a pair (input, "
                    "label). Wrap the data set so that each item is such a pair."
                )
            size = getattr(item[0], "size", None)
            if not isinstance(size, tuple):
                return None
            sizes.add(size)
        if len(sizes) == 1:
            width, height = next(iter(sizes))
            if width == height:
                return int(width)
        return FALLBACK_IMAGE_SIZE
