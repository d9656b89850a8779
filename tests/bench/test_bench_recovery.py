"""The comparison of recoveries: its rows, and torchrun's side with a real kill."""

from __future__ import annotations

import pytest

from adaptive_platform.bench import recovery as recovery_bench
from adaptive_platform.bench.recovery import recovery, rows_of
from adaptive_platform.errors import RunFailedError

FOUND = {
    "live": {"next step": [0.3, 0.5, 0.4], "replacement in": [6.0, 7.0, 5.0]},
    "ray-train": {"next step": [14.0, 16.0, 15.0], "steps repeated": [6.0, 4.0, 5.0]},
    "restart": {"next step": [7.5, 7.0, 8.0]},
}


def test_rows_are_medians_of_ours_over_medians_of_theirs():
    rows = {row.case: row for row in rows_of(FOUND)}
    live = rows["live over ray-train: kill to next step"]
    assert (live.value, live.baseline, live.repeats) == (0.4, 15.0, 3)
    assert live.ratio == pytest.approx(0.4 / 15.0)
    assert rows["restart over ray-train: kill to next step"].ratio == pytest.approx(0.5)
    assert rows["live: replacement in"].value == 6.0
    assert not any("torchrun" in case for case in rows), "a side that failed has no row"


def test_a_side_that_fails_is_told_and_the_others_are_measured(monkeypatch):
    def measure(side: str, kills: int) -> dict[str, list[float]]:
        if side == "torchrun":
            raise RunFailedError("not over within 240 s")
        return FOUND[side]

    monkeypatch.setattr(recovery_bench, "_measure", measure)
    told: list[str] = []
    rows = recovery(quick=False, say=told.append)
    assert "torchrun: not over within 240 s" in told
    assert [row.case for row in rows][:2] == [
        "live over ray-train: kill to next step",
        "restart over ray-train: kill to next step",
    ]


def test_a_killed_worker_of_torchrun_goes_on_from_its_snapshot():
    found = recovery_bench._measure("torchrun", 1)
    assert found["next step"][0] > 0.0
    assert 0.0 <= found["steps repeated"][0] < 60.0
