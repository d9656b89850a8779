import io

import numpy as np
import pytest
from PIL import Image

from adaptive_platform.data.images import (
    FALLBACK_IMAGE_SIZE,
    BrokenImageError,
    common_size,
    decode_image,
    to_rgb,
)

WHITE = (255, 255, 255)


def encoded(image: Image.Image, form: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def only_pixel(source: bytes, background=WHITE) -> tuple[int, int, int]:
    image = decode_image(source, background)
    assert image.mode == "RGB"
    pixels = np.asarray(image).reshape(-1, 3)
    assert np.ptp(pixels, axis=0).max() <= 3
    return tuple(int(v) for v in pixels[0])


def test_a_red_cmyk_jpeg_stays_red():
    red, green, blue = only_pixel(encoded(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "JPEG"))
    assert red > 240
    assert green < 15
    assert blue < 15


@pytest.mark.parametrize("background", [WHITE, (10, 200, 30)])
def test_transparency_shows_the_background(background):
    rgba = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    gray_alpha = Image.new("LA", (4, 4), (7, 0))
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([0, 0, 0, 90, 90, 90])
    colour_key = encoded(Image.new("RGB", (4, 4), (1, 2, 3)), transparency=(1, 2, 3))
    for source in (
        encoded(rgba),
        encoded(gray_alpha),
        encoded(palette, transparency=1),
        colour_key,
    ):
        assert only_pixel(source, background) == background


def test_half_transparent_is_mixed():
    pixel = only_pixel(encoded(Image.new("RGBA", (2, 2), (255, 0, 0, 128))), (0, 0, 0))
    assert pixel == (128, 0, 0)


def test_opaque_modes_keep_their_colour():
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([0, 0, 0, 9, 80, 70])
    assert only_pixel(encoded(palette)) == (9, 80, 70)
    assert only_pixel(encoded(Image.new("L", (3, 9), 77))) == (77, 77, 77)
    assert only_pixel(encoded(Image.new("1", (3, 3), 1))) == (255, 255, 255)
    assert only_pixel(encoded(Image.new("RGB", (3, 3), (1, 2, 3)))) == (1, 2, 3)


@pytest.mark.parametrize(("value", "expected"), [(0, 0), (257 * 100, 100), (65535, 255)])
def test_sixteen_bit_gray_is_scaled_not_clipped(value, expected):
    image = Image.fromarray(np.full((4, 4), value, dtype=np.uint16))
    assert only_pixel(encoded(image)) == (expected,) * 3
    assert only_pixel(encoded(image, "TIFF")) == (expected,) * 3


def test_floating_point_pixels_are_refused_with_a_reason():
    with pytest.raises(BrokenImageError, match="no agreed range"):
        to_rgb(Image.new("F", (2, 2), 0.5), WHITE)


def test_broken_sources_say_why(tmp_path):
    noise = np.random.default_rng(0).integers(0, 255, (40, 40, 3), dtype=np.uint8)
    whole = encoded(Image.fromarray(noise), "JPEG")
    with pytest.raises(BrokenImageError, match="truncated"):
        decode_image(whole[: len(whole) // 2], WHITE)
    with pytest.raises(BrokenImageError, match="no bytes"):
        decode_image(b"", WHITE)
    with pytest.raises(BrokenImageError, match="not an image"):
        decode_image(b"hello, this is text", WHITE)
    with pytest.raises(BrokenImageError, match="No such file"):
        decode_image(str(tmp_path / "absent.png"), WHITE)


def test_the_sets_own_size_where_all_are_square_and_alike():
    small = encoded(Image.new("L", (48, 48)))
    wide = encoded(Image.new("L", (300, 8)))
    assert common_size([small, b"no image", small]) == (48, 2)
    assert common_size([small, wide]) == (FALLBACK_IMAGE_SIZE, 2)
    assert common_size([wide, wide]) == (FALLBACK_IMAGE_SIZE, 2)
    assert common_size([b"no image"]) == (FALLBACK_IMAGE_SIZE, 0)
