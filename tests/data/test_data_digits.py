import subprocess
import sys

import pytest
import torch

from adaptive_platform.data import digits
from adaptive_platform.data.digits import DigitsConfig
from adaptive_platform.errors import DataError


def test_equals_what_scikit_learn_loads_and_holds_out_a_fifth_of_every_class():
    from sklearn.datasets import load_digits

    source = DigitsConfig(image_size=8).open()
    images, labels = load_digits(return_X_y=True)
    ours = sorted(
        (int(label), *pixels.flatten().tolist())
        for part in (source.train, source.eval)
        for pixels, label in (part[k] for k in range(len(part)))
    )
    theirs = sorted(
        (int(label), *(round(v * 255 / 16 + 1e-9) for v in image))
        for image, label in zip(images.tolist(), labels, strict=True)
    )
    differences = [
        abs(a - b) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True)
    ]
    assert max(differences) <= 1, "rounding of halves only"
    total = torch.bincount(torch.as_tensor(labels))
    assert torch.equal(torch.bincount(source.eval.labels), total // 5)
    assert len(source.train) + len(source.eval) == 1797


def test_default_form_and_normalization():
    source = DigitsConfig().open()
    pixels = source.train.pixels
    assert pixels.shape == (1442, 1, 32, 32)
    scaled = pixels.float() / 255
    config = DigitsConfig()
    assert scaled.mean().item() == pytest.approx(config.mean[0], abs=2e-3)
    assert scaled.std().item() == pytest.approx(config.std[0], abs=2e-3)
    assert source.classes == tuple("0123456789")


def test_reading_does_not_import_scikit_learn():
    code = (
        "import sys; from adaptive_platform.data.digits import DigitsConfig; DigitsConfig().open();"
        "print([m for m in ('sklearn', 'scipy', 'pandas') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_missing_scikit_learn_is_explained(monkeypatch):
    monkeypatch.setattr(digits.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match="pip install scikit-learn"):
        DigitsConfig().open()
