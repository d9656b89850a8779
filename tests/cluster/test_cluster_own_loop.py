"""`ap.Run` keeps other processes out of its run directory for as long as it lives."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed import HashStore
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import adaptive_platform as ap
from adaptive_platform.cluster import own_loop
from adaptive_platform.collectives import Membership
from adaptive_platform.errors import UserError


def begin(run_dir, *words):
    points = TensorDataset(torch.randn(40, 3), torch.arange(40) % 2)
    recipe = {
        "out": str(run_dir),
        "stop": {"steps": 3},
        "data": {"kind": "python"},
        "optimizer": {"kind": "sgd", "lr": 0.1},
        "schedule": {"kind": "constant"},
        "lr_rule": {"kind": "none"},
        "batch": {"kind": "fixed", "global_batch": 8},
        "report": {"html": False, "evaluate_every": "0 epochs"},
    }
    return ap.Run(recipe, nn.Linear(3, 2), points, *words)


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.setattr(own_loop, "meet", lambda seconds: (Membership(HashStore(), 0, 1), "one"))


def test_a_run_directory_is_one_process_s_own_until_the_run_is_closed(tmp_path):
    with begin(tmp_path / "run") as run:
        with pytest.raises(UserError, match="another process is at work in this run"):
            begin(tmp_path / "run")
        for batch in run:
            run.backward(F.cross_entropy(run.model(batch.inputs), batch.targets, reduction="none"))
    with begin(tmp_path / "run", "stop.steps=5") as run:
        assert run.progress.step == 3


def test_a_run_that_could_not_begin_holds_nothing(tmp_path):
    with pytest.raises(UserError, match="absa"):
        begin(tmp_path / "run", "batch.kind=absa")
    with begin(tmp_path / "run") as run:
        assert run.progress.step == 0
