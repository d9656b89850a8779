"""A set of samples before any transform: what every reader returns and the stream draws from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from torch import Tensor

from adaptive_platform.data.images import decode_image

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["EncodedImages", "InMemoryImages", "Samples"]


class Samples(ABC):
    """Map-style set of raw samples: `(image or tensor, label)` by index."""

    image_size: int | None = None
    """Side in pixels that the transforms resize to; None leaves images as large as they are."""
    tensors_are_images: bool = False
    """True where tensors are pixels to resize and augment; else tensors are used as they are."""
    reads_randomly: bool = False
    """True where reading may draw random numbers, which are then seeded per sample."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> tuple[Image.Image | Tensor, Any]:
        """Raw sample `index`.

        Raises:
            BrokenImageError: It can't be read.
        """

    @property
    def held_bytes(self) -> int:
        """Bytes of encoded images that a cache of this worker holds; 0 without a cache."""
        return 0

    @abstractmethod
    def where(self, index: int) -> str:
        """Path, or file and row, of sample `index`, as a person would look for it."""


class EncodedImages(Samples):
    """Images as files hold them, which a decoder reads together with what it will cut out."""

    background: tuple[int, int, int] = (255, 255, 255)
    """Colour shown through transparent pixels."""

    @abstractmethod
    def encoded(self, index: int) -> bytes:
        """Image `index` as its file has it.

        Raises:
            BrokenImageError: It can't be read from storage.
        """

    @abstractmethod
    def label(self, index: int) -> int:
        """Class number of image `index`."""

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return decode_image(self.encoded(index), self.background), self.label(index)


class InMemoryImages(Samples):
    """Images held as one tensor.

    Args:
        pixels: uint8, [N, C, H, H] with C = 1 or 3.
        labels: int64, [N].
        name: What `where` calls the set.
        image_size: Side to train at; `H` unless given.
    """

    tensors_are_images = True

    def __init__(
        self, pixels: Tensor, labels: Tensor, name: str, image_size: int | None = None
    ) -> None:
        self.pixels = pixels
        self.labels = labels
        self.image_size = image_size or pixels.shape[-1]
        self._name = name

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.pixels[index], self.labels[index]

    def where(self, index: int) -> str:
        """Name of the set and index."""
        return f"{self._name}[{index}]"
