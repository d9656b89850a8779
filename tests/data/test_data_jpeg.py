"""The fast way through a JPEG against the whole picture as Pillow reads it."""

import io

import numpy as np
import pytest
import simplejpeg
import torch
from PIL import Image

from adaptive_platform.data.augmentation import Window
from adaptive_platform.data.decoding import Decoder
from adaptive_platform.data.image_folder import ImageFolderConfig
from adaptive_platform.data.images import decode_image
from adaptive_platform.data.jpeg import decode_window, read_frame, scale_for
from adaptive_platform.data.samples import EncodedImages

WHITE = (255, 255, 255)


def photograph(height, width, seed=0):
    """Smooth shapes with some grain: what cosine transforms are made for."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(1, 3, 7, 9, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, (height, width), mode="bicubic")[0]
    grain = 0.03 * torch.randn(3, height, width, generator=generator)
    pixels = ((smooth + grain).clamp(0, 1) * 255).to(torch.uint8)
    return pixels.permute(1, 2, 0).contiguous().numpy()


def encoded(height=150, width=220, *, mode="RGB", seed=0, **options):
    buffer = io.BytesIO()
    Image.fromarray(photograph(height, width, seed)).convert(mode).save(buffer, "JPEG", **options)
    return buffer.getvalue()


def by_pillow(source):
    return torch.from_numpy(np.array(decode_image(source, WHITE))).permute(2, 0, 1)


@pytest.mark.parametrize("subsampling", ["444", "422", "420", "440", "411"])
@pytest.mark.parametrize("rows", [(0, 1), (0, 17), (30, 64), (100, 129), (1, 149), (0, 150)])
def test_at_full_scale_every_window_is_pillows_to_the_byte(subsampling, rows):
    source = simplejpeg.encode_jpeg(photograph(150, 220), 90, colorsubsampling=subsampling)
    frame = read_frame(source)
    assert (frame.height, frame.width) == (150, 220)
    window = Window(rows[0], 3, rows[1] - rows[0], 200, rows[1] - rows[0], 200)
    found = decode_window(source, frame, window, 1)
    assert torch.equal(found, by_pillow(source)[:, rows[0] : rows[1], 3:203])


@pytest.mark.parametrize(
    "options",
    [
        {"progressive": True},
        {"mode": "L"},
        {"keep_rgb": True},
        {"restart_marker_rows": 1},
        {"optimize": True, "comment": b"\xff\xd9 no end", "exif": Image.Exif().tobytes()},
    ],
)
def test_other_forms_of_jpeg_are_pillows_to_the_byte(options):
    source = encoded(**options)
    window = Window(20, 10, 60, 90, 60, 90)
    found = decode_window(source, read_frame(source), window, 1)
    assert torch.equal(found, by_pillow(source)[:, 20:80, 10:100])


def test_rows_below_the_window_are_not_decoded(monkeypatch):
    heights = []
    whole = simplejpeg.decode_jpeg

    def spy(*args, **options):
        pixels = whole(*args, **options)
        heights.append(len(pixels))
        return pixels

    monkeypatch.setattr(simplejpeg, "decode_jpeg", spy)
    source = encoded(640, 480)
    decode_window(source, read_frame(source), Window(10, 0, 90, 400, 24, 24), 1)
    decode_window(source, read_frame(source), Window(0, 0, 640, 480, 24, 24), 4)
    assert heights == [160, 160]


def test_what_the_fast_way_does_not_read_faithfully_is_left_to_pillow():
    png = io.BytesIO()
    Image.fromarray(photograph(20, 20)).save(png, "PNG")
    whole = encoded()
    for source in (
        b"",
        b"no image",
        png.getvalue(),
        encoded(mode="CMYK"),
        whole[: len(whole) // 2],
        whole[:-1],
        whole + b"\0",
        whole[:30] + b"\xff\xd9",
    ):
        assert read_frame(source) is None
    huge = bytearray(whole)
    at = read_frame(whole).height_at
    huge[at : at + 4] = b"\xff\xff\xff\xff"
    assert read_frame(bytes(huge)) is None


@pytest.mark.parametrize(
    ("side", "scale"), [(20, 1), (24, 1), (48, 1), (95, 1), (96, 4), (191, 4), (192, 8), (999, 8)]
)
def test_the_scale_never_makes_a_window_smaller_than_the_result(side, scale):
    assert scale_for(Window(0, 0, side, 500, 24, 24)) == scale


@pytest.mark.parametrize("scale", [2, 4, 8])
def test_a_reduced_picture_differs_little_and_is_not_moved(scale):
    source = encoded(601, 803, quality=95)
    frame = read_frame(source)
    whole = by_pillow(source)
    for top, left, height, width in [(0, 0, 601, 803), (101, 77, 433, 501), (33, 64, 400, 400)]:
        window = Window(top, left, height, width, 48, 48)
        found = decode_window(source, frame, window, scale).float()
        difference = (found - window.resized(whole).float()).abs()
        assert difference.mean() < 1.0
        assert difference.max() < 12


class Files(EncodedImages):
    image_size = 24

    def __init__(self, files):
        self.files = files

    def __len__(self):
        return len(self.files)

    def encoded(self, index):
        return self.files[index]

    def label(self, index):
        return index

    def where(self, index):
        return f"file {index}"


@pytest.mark.parametrize("augmentation", ["none", "crop_flip", "resized_crop"])
@pytest.mark.parametrize("training", [True, False])
def test_the_decoder_makes_the_same_choices_whoever_decodes(augmentation, training, monkeypatch):
    config = ImageFolderConfig(train=".", augmentation=augmentation, reduced_jpeg=False)
    files = Files([encoded(40 + 7 * k, 90 - 5 * k, seed=k) for k in range(8)])
    decoder = Decoder(files, config, seed=3, training=training)
    fast = decoder(2, np.arange(8)).inputs
    monkeypatch.setattr("adaptive_platform.data.decoding.read_frame", lambda encoded: None)
    assert torch.equal(fast, decoder(2, np.arange(8)).inputs)
    monkeypatch.undo()
    monkeypatch.setattr("adaptive_platform.data.decoding.decode_window", lambda *_: None)
    assert torch.equal(fast, decoder(2, np.arange(8)).inputs)


def test_a_reduced_picture_gets_the_same_window_and_the_option_switches_it_off():
    files = Files([encoded(400, 300, seed=k) for k in range(6)])

    def decoded(**options):
        config = ImageFolderConfig(train=".", augmentation="resized_crop", **options)
        return Decoder(files, config, seed=0, training=True)(0, np.arange(6)).inputs.float()

    whole, reduced = decoded(reduced_jpeg=False), decoded()
    assert not torch.equal(whole, reduced)
    assert (whole - reduced).abs().mean() < 2.0


@pytest.mark.parametrize("augmentation", ["none", "resized_crop"])
def test_pillows_verdict_on_damaged_files_is_kept(augmentation, monkeypatch):
    """Whatever bytes are damaged: both ways read the same pixels, or both call it broken."""
    source = encoded(120, 160, quality=85)
    generator = np.random.default_rng(0)
    config = ImageFolderConfig(train=".", augmentation=augmentation, reduced_jpeg=False)
    files = Files([])
    for number in range(400):
        spoilt = bytearray(source)
        end = 650 if number % 2 else len(source) - 2  # headers, or anywhere
        for place in generator.integers(2, end, generator.integers(1, 4)):
            spoilt[place] = generator.integers(0, 256)
        files.files.append(bytes(spoilt))
    decoder = Decoder(files, config, seed=0, training=True)
    found = decoder(0, np.arange(400))
    monkeypatch.setattr("adaptive_platform.data.decoding.read_frame", lambda encoded: None)
    expected = decoder(0, np.arange(400))
    assert 40 < len(expected.broken) < 360
    assert found.broken == expected.broken
    assert torch.equal(found.inputs, expected.inputs)
