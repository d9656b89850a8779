"""Any file that PIL opens becomes an honest three-channel image, or a reason why it can't."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL import Image

__all__ = [
    "FALLBACK_IMAGE_SIZE",
    "IMAGE_EXTENSIONS",
    "BrokenImageError",
    "common_size",
    "decode_image",
    "to_rgb",
]

FALLBACK_IMAGE_SIZE = 224
"""Side in pixels where the images of a set differ in size and the user named none."""

IMAGE_EXTENSIONS = frozenset(
    f".{ending}"
    for ending in (
        *("avif", "bmp", "gif", "jfif", "jp2", "jpe", "jpeg", "jpg", "pbm", "pgm"),
        *("png", "pnm", "ppm", "tga", "tif", "tiff", "webp"),
    )
)
"""File name endings taken for images, in any case."""


class BrokenImageError(Exception):
    """A sample that can't be read faithfully; the text is the reason."""


def decode_image(source: str | bytes, background: tuple[int, int, int]) -> Image.Image:
    """Read one image completely and convert it to RGB.

    Args:
        source: Path of a file, or an encoded image.
        background: Colour shown through transparent pixels.

    Raises:
        BrokenImageError: Not an image, cut short, or without a faithful reading.
    """
    from PIL import Image, UnidentifiedImageError

    if not source:
        raise BrokenImageError("no bytes")
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as opened:
            opened.load()
            return to_rgb(opened, background)
    except UnidentifiedImageError:
        raise BrokenImageError("not an image, or an unknown format") from None
    except BrokenImageError:
        raise
    except Exception as error:  # damaged files make the decoders raise almost anything
        raise BrokenImageError(str(error) or type(error).__name__) from error


def to_rgb(image: Image.Image, background: tuple[int, int, int]) -> Image.Image:
    """Convert an image of any mode to RGB.

    Transparency (alpha channels, transparent palette entries and colours) is composed over
    `background`. 16-bit gray is scaled to 8 bits. CMYK keeps its colours.

    Raises:
        BrokenImageError: Floating-point pixels, whose range the file does not say.
    """
    from PIL import Image

    if image.mode == "F":
        raise BrokenImageError("floating-point pixels have no agreed range; save it as 8 or 16 bit")
    if image.mode == "I" or image.mode.startswith("I;16"):
        import numpy as np

        gray = np.clip(np.asarray(image).astype(np.int64), 0, 65535) // 257
        return Image.fromarray(gray.astype(np.uint8)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        seen = image.convert("LA").convert("RGBA") if image.mode == "La" else image.convert("RGBA")
        below = Image.new("RGBA", seen.size, (*background, 255))
        return Image.alpha_composite(below, seen).convert("RGB")
    return image.convert("RGB") if image.mode != "RGB" else image.copy()


def common_size(sources: Sequence[str | bytes]) -> tuple[int, int]:
    """Look at the headers of some images and choose the side that the set is trained at.

    Args:
        sources: Paths or encoded images, a few spread over the set.

    Returns:
        Side in pixels (the images' own when all are square and alike, else
        `FALLBACK_IMAGE_SIZE`) and how many of the sources have a readable header.
    """
    from PIL import Image

    sizes = []
    for source in sources:
        try:
            with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as opened:
                sizes.append(opened.size)
        except Exception:  # reported when the sample is taken, not while looking around
            continue
    if sizes and len(set(sizes)) == 1 and sizes[0][0] == sizes[0][1]:
        return sizes[0][0], len(sizes)
    return FALLBACK_IMAGE_SIZE, len(sizes)
