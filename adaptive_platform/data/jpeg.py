"""JPEG to the pixels that a window needs: no rows below it, at the smallest scale that serves it.

Decoding goes through simplejpeg, the same libjpeg-turbo as Pillow's without its detours: at full
scale both give the same bytes. Whatever is not a complete JPEG of gray, YCbCr or RGB is refused
here, and left to Pillow and the policy for broken samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adaptive_platform.data.augmentation import Window

__all__ = ["Frame", "decode_window", "read_frame", "scale_for"]

_BASELINE = (0xC0, 0xC1)
_PROGRESSIVE = 0xC2
_OTHER_FRAMES = (0xC3, *range(0xC5, 0xC8), *range(0xC9, 0xCC), *range(0xCD, 0xD0))
_SCAN = 0xDA
_MOST_PIXELS = 2**26
"""Larger pictures are left to Pillow, which guards against decompression bombs."""
_BLOCK_ROWS = 32
"""The tallest row of blocks (4:1:0); smoothing of colours looks no further down than that."""


@dataclass(frozen=True, slots=True)
class Frame:
    """What a JPEG's frame header says."""

    height: int
    width: int
    height_at: int
    """Where in the file the height stands, two bytes."""
    ends_anywhere: bool
    """True where blocks come row by row, so that decoding may end after any of them."""


def read_frame(encoded: bytes) -> Frame | None:
    """Look for the frame header of a JPEG.

    Returns:
        None where the file is no JPEG, is cut short, or holds pixels of another kind than 8-bit
        gray, YCbCr or RGB.
    """
    if encoded[:2] != b"\xff\xd8" or encoded[-2:] != b"\xff\xd9":
        return None
    at = 2
    while at + 10 <= len(encoded) and encoded[at] == 0xFF:
        marker = encoded[at + 1]
        if marker in _BASELINE or marker == _PROGRESSIVE:
            bits, components = encoded[at + 4], encoded[at + 9]
            height = int.from_bytes(encoded[at + 5 : at + 7], "big")
            width = int.from_bytes(encoded[at + 7 : at + 9], "big")
            usable = bits == 8 and components in (1, 3) and 0 < height * width <= _MOST_PIXELS
            return Frame(height, width, at + 5, marker in _BASELINE) if usable else None
        if marker in _OTHER_FRAMES or marker == _SCAN:
            return None
        at += 2 + int.from_bytes(encoded[at + 2 : at + 4], "big")
    return None


def scale_for(window: Window) -> int:
    """The largest of 1, 4 and 8 by which the window can shrink before it is resized.

    It stays at least as large as the result, so nothing is blown up again. Half the size is left
    out, since it saves less than the finer resize costs that comes after it.
    """
    fit = min(window.height // window.to_height, window.width // window.to_width)
    return max(scale for scale in (1, 4, 8) if scale <= max(fit, 1))


def decode_window(encoded: bytes, frame: Frame, window: Window, scale: int) -> Tensor | None:
    """Decode what the window needs and resize it.

    Args:
        encoded: The file.
        frame: What `read_frame` found in it.
        window: Which part to resize, and to what.
        scale: 1, 2, 4 or 8: decode at this fraction of the size, in the domain of the cosine
            transform.

    Returns:
        uint8, [3, to_height, to_width]; None where the decoder complains.
    """
    import simplejpeg

    rows = frame.height
    source: bytes | bytearray = encoded
    if frame.ends_anywhere:
        # The rows below are left out by telling the decoder that the picture ends above them.
        below = -(-(window.top + window.height) // _BLOCK_ROWS) + 1
        rows = min(frame.height, below * _BLOCK_ROWS)
        if rows < frame.height:
            source = bytearray(encoded)
            source[frame.height_at : frame.height_at + 2] = rows.to_bytes(2, "big")
    shape = (-(-rows // scale), -(-frame.width // scale), 3)
    smallest = (shape[0], shape[1]) if scale > 1 else (0, 0)
    try:
        pixels = simplejpeg.decode_jpeg(
            source,
            min_height=smallest[0],
            min_width=smallest[1],
            # What comes after the last row that was asked for is a warning.
            strict=rows == frame.height,
        )
    except ValueError:
        return None
    if pixels.shape != shape:
        return None
    if scale == 1:
        return window.resized(torch.from_numpy(pixels).permute(2, 0, 1))
    return _resized_between_pixels(pixels, window, scale)


def _resized_between_pixels(pixels: NDArray[np.uint8], window: Window, scale: int) -> Tensor:
    """Resize a window whose edges fall between the pixels of a reduced picture.

    torch's resize knows whole pixels only; rounding the edges would move the picture by up to half
    a pixel and double the difference from the full picture.
    """
    from PIL import Image

    whole = Image.fromarray(pixels)
    edges = (
        window.left / scale,
        window.top / scale,
        min((window.left + window.width) / scale, whole.width),
        min((window.top + window.height) / scale, whole.height),
    )
    resized = whole.resize(
        (window.to_width, window.to_height), Image.Resampling.BILINEAR, box=edges
    )
    return torch.from_numpy(np.array(resized)).permute(2, 0, 1)
