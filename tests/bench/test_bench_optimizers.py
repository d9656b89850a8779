"""The optimizers' benchmark on a small stage: which rows, and that both sides do the same work."""

from __future__ import annotations

import pytest
from torch.distributed import HashStore

from adaptive_platform.bench import optimizers as bench
from adaptive_platform.collectives import Membership
from adaptive_platform.errors import UserError

STAGE = bench._Stage("resnet8_cifar", 8, 4, bench._SECOND_ORDER, 2, 2, 2)


def test_rows_compare_what_was_timed() -> None:
    times = {"sgd": [1.0, 1.0, 2.0, 2.0], "sp_ngd": [1.0, 2.0, 3.0, 9.0]}
    over, longest = bench._compare(STAGE, times, "CPU s")
    assert over.case == "resnet8_cifar at 8x8, 4 per worker: sp_ngd over sgd"
    assert over.unit == "CPU s/step"
    assert over.ratio == pytest.approx((1.5 / 1.0 + 6.0 / 2.0) / 2)
    assert (longest.value, longest.baseline, longest.repeats) == (9.0, 2.5, 4)


def test_first_order_rows_have_torch_s_own_as_baselines() -> None:
    times = {name: [1.0, 1.0] for name in bench._FIRST_ORDER}
    cases = [row.case.split(": ")[1] for row in bench._compare(STAGE, times, "s")]
    assert cases == ["lars over sgd", "lamb over adamw"]


def test_each_arm_makes_its_steps() -> None:
    membership = Membership(HashStore(), 0, 1)
    wall, cpu = bench._take_turns(membership, STAGE)
    assert {name: len(times) for name, times in wall.items()} == {"sgd": 4, "sp_ngd": 4}
    assert {name: len(times) for name, times in cpu.items()} == {"sgd": 4, "sp_ngd": 4}


def test_memory_of_factors_is_counted() -> None:
    membership = Membership(HashStore(), 0, 1)
    found = bench._measure_memory(membership, STAGE, "sp_ngd")
    assert found["kept_mib"] > 0.1
    assert found["peak_mib"] > found["kept_mib"]


def test_stages_have_titles_of_their_own() -> None:
    for stages in (bench._QUICK, bench._FULL):
        titles = [(stage.title, tuple(stage.arms)) for stage in stages]
        assert len(set(titles)) == len(titles)


def test_a_stage_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UserError, match="--case = resnet19: must be one of resnet18 at 32x32"):
        bench.optimizers(quick=False, stages=("resnet19",))


def test_the_factors_of_resnet50_are_those_of_the_sheet_and_are_shared_out() -> None:
    rows = {row.case.split(" of ")[1].split(",")[0]: row for row in bench._factors_per_worker()}
    assert rows["1"].value == pytest.approx(586.9, abs=0.05)
    assert 0.5 <= rows["2"].ratio < 0.6
    assert rows["32"].value <= rows["8"].value < rows["2"].value
