"""The statistics as functions: what the guide shows runs, and each name is used."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

GUIDE = Path(__file__).parents[2] / "docs" / "own-loop.md"


def test_the_guides_example_runs() -> None:
    (code,) = (
        block
        for block in re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.S)
        if "adaptive_platform.statistics" in block
    )
    torch.manual_seed(0)
    found: dict[str, Any] = {}
    exec(code, found)
    assert len(found["of_layers"]) == 2
    assert found["of_layers"][0] < found["noise_scale"]  # the layer with a signal
    weight = found["weight"].detach()
    curvature = 12 * weight.square()
    assert found["top"] == pytest.approx(float(curvature.max()), rel=0.1)
    assert found["both_ends"] == pytest.approx(sorted(curvature.tolist()), rel=1e-2, abs=1e-2)
    assert found["step"].shape == found["ratio"].shape == (20,)
