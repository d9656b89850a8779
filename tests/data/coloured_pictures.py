"""Small JPEG pictures whose colour tells their class."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

COLOURS = [(200, 30, 30), (30, 200, 30), (30, 30, 200)]


def jpeg(label: int, index: int, size: tuple[int, int] = (32, 32)) -> bytes:
    """A noisy picture in the colour of its class, large enough that half of it is cut short."""
    generator = np.random.default_rng([label, index])
    noise = generator.integers(-25, 25, (size[1], size[0], 3))
    pixels = np.clip(np.array(COLOURS[label % 3]) + noise, 0, 255).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()
