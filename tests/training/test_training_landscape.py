"""The loss around a checkpoint: value and gradient, and the study that asks how sharp it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from adaptive_platform.checkpoints.store import CheckpointStore
from adaptive_platform.errors import UserError
from adaptive_platform.recipe import load_recipe
from adaptive_platform.statistics.sharpness import sharpness
from adaptive_platform.training.landscape import landscape_of

STUDY = Path(__file__).parents[2] / "experiments" / "studies" / "sharpness.py"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    """Digits, a small net with its first weights, one checkpoint."""
    folder = tmp_path_factory.mktemp("run")
    recipe = load_recipe("quickstart", ["model={name: resnet8_cifar}"])
    (folder / "recipe.yaml").write_text(recipe.to_yaml())
    source = recipe.data.open()
    model = recipe.model.build(len(source.classes), seed=0)
    CheckpointStore(str(folder)).save({"model": dict(model.state_dict())}, step=7)
    return folder


def test_value_and_gradient_are_those_of_the_mean_loss(run_dir):
    landscape = landscape_of(str(run_dir), limit=40)
    assert landscape.num_samples == 40
    at = landscape.parameters()
    value, gradient = landscape(at)
    recipe = load_recipe(str(run_dir / "recipe.yaml"))
    source = recipe.data.open()
    model = recipe.model.build(len(source.classes), seed=0).eval()
    batch = landscape._batches[0]
    loss = F.cross_entropy(model(batch.inputs), batch.targets)
    loss.backward()
    assert value == pytest.approx(loss.item(), rel=1e-5)
    expected = torch.cat([p.grad.reshape(-1) for p in model.parameters()]).double()
    np.testing.assert_allclose(gradient, expected.numpy(), rtol=1e-3, atol=1e-6)
    step = 1e-3 * gradient / np.linalg.norm(gradient)
    rise = landscape(at + step)[0] - landscape(at - step)[0]
    assert rise == pytest.approx(2e-3 * np.linalg.norm(gradient), rel=0.05)


def test_a_wider_box_is_sharper_and_a_subspace_is_not_sharper_than_the_whole(run_dir):
    landscape = landscape_of(str(run_dir), limit=20)
    at = landscape.parameters()
    small, wide = (sharpness(landscape, at, epsilon=e, iterations=2).value for e in (5e-4, 1e-3))
    assert 0.0 < small < wide
    columns = np.random.default_rng(0).standard_normal((len(at), 3))
    assert sharpness(landscape, at, directions=columns, iterations=2).value < wide


def test_the_study_prints_a_line_for_a_run(run_dir):
    words = [str(run_dir), "--samples", "20", "--repeats", "2", "--directions", "2"]
    done = subprocess.run(
        [sys.executable, str(STUDY), *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "epsilon 0.001" in done.stdout
    assert "(20 samples, 2 runs)" in done.stdout


def test_what_is_not_there_is_named(run_dir, tmp_path):
    with pytest.raises(UserError, match="no checkpoint of step 8"):
        landscape_of(str(run_dir), step=8)
    (tmp_path / "recipe.yaml").write_text((run_dir / "recipe.yaml").read_text())
    with pytest.raises(UserError, match="no checkpoint; a run saves one"):
        landscape_of(str(tmp_path))
    done = subprocess.run(
        [sys.executable, str(STUDY), str(run_dir), "--directions", "1000000"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "--directions = 1000000" in done.stderr
    assert "Traceback" not in done.stderr
