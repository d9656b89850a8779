"""The study of asynchronous exchange: its arithmetic in order of arrival, and its staleness."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

STUDIES = Path(__file__).parents[2] / "experiments" / "studies"


@pytest.fixture
def study(monkeypatch):
    monkeypatch.syspath_prepend(str(STUDIES))
    sys.modules.pop("asynchronous", None)
    import asynchronous

    return asynchronous


def test_order_matters_and_the_total_is_conserved(study):
    """x = (1, 3), centre 0, alpha 1/4, one worker after the other."""
    centre = study.Centre(torch.zeros(1), share=0.25, budget=100)
    left = []
    for rank, x in enumerate((1.0, 3.0)):
        weights = torch.tensor([x])
        difference, stale, over = centre.exchange(rank, weights, 1)
        left.append(float(weights - difference))
        assert (stale, over) == (0, False)
    assert left == pytest.approx([0.75, 2.3125])
    assert float(centre.result()) == pytest.approx(0.9375)
    assert sum(left) + float(centre.result()) == pytest.approx(4.0)


def test_what_others_did_meanwhile_is_staleness(study):
    centre = study.Centre(torch.zeros(1), share=0.25, budget=5)
    calls = [centre.exchange(rank, torch.ones(1), 1) for rank in (0, 1, 1, 1, 0)]
    assert [stale for _, stale, _ in calls] == [0, 0, 0, 0, 3]
    assert [over for _, _, over in calls] == [False] * 4 + [True]


def test_a_pull_reads_what_was_published_however_old(study):
    board = study.Board(torch.zeros(1), budget=100)
    new, stale, _ = board.exchange(0, torch.tensor([4.0]), 4, own_step=4, peer=1)
    assert (float(new), stale) == (2.0, 4)  # of worker 1 only the start is known
    new, stale, _ = board.exchange(1, torch.tensor([8.0]), 4, own_step=12, peer=0)
    assert (float(new), stale) == (6.0, 8)
    new, stale, _ = board.exchange(1, torch.tensor([8.0]), 4, own_step=16, peer=1)
    assert (float(new), stale) == (8.0, 0)
