import pytest
import torch
from torchvision.transforms import v2

from adaptive_platform.data.normalization import Normalization

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("laid_out", [torch.contiguous_format, torch.channels_last])
def test_it_equals_torchvisions_in_either_layout(memory_format, laid_out):
    pixels = torch.randint(0, 256, (4, 3, 8, 9), dtype=torch.uint8)
    kept = pixels.clone()
    expected = v2.functional.normalize(pixels.float() / 255, MEAN, STD)
    found = Normalization(MEAN, STD)(pixels.contiguous(memory_format=laid_out), memory_format)
    assert found.is_contiguous(memory_format=memory_format)
    assert torch.allclose(found, expected, atol=1e-6)
    assert torch.equal(pixels, kept)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_gray_becomes_three_channels(memory_format):
    gray = torch.randint(0, 256, (4, 1, 8, 8), dtype=torch.uint8)
    normalization = Normalization(MEAN, STD)
    found = normalization(gray, memory_format)
    assert found.shape == (4, 3, 8, 8)
    assert torch.equal(found, normalization(gray.expand(-1, 3, -1, -1), memory_format))
