"""The benchmark of statistics: its rows, its intervals, and that every loop takes its steps."""

from __future__ import annotations

import json

import pytest
from torch import distributed as dist
from torch.distributed import HashStore
from torch.optim.optimizer import register_optimizer_step_post_hook
from typer.testing import CliRunner

from adaptive_platform.bench import loops, overhead
from adaptive_platform.bench.loops import OURS, THEIRS, bare_loop, missing, our_loop
from adaptive_platform.bench.overhead import Measurement, all_cases, overhead_rows
from adaptive_platform.bench.rows import median_interval
from adaptive_platform.cli import app
from adaptive_platform.collectives import Membership
from adaptive_platform.errors import UserError

TURNS = [1.0, 1.1] * 10


def test_ratios_pair_the_turns_and_interval_loops_are_taken_in_blocks_of_ten():
    slow = [t * 1.5 for t in TURNS]
    tenth = [t * (2.0 if at % 10 == 9 else 1.0) for at, t in enumerate(TURNS)]
    measurement = Measurement(
        case="resnet18",
        unit="s/step",
        values={"bare": TURNS, "loop": slow, "statistics": slow, "vr": tenth},
    )
    rows = {row.case: row for row in overhead_rows(measurement)}
    row = rows["resnet18: norm statistics over bare DDP"]
    assert (row.ratio, row.repeats) == (pytest.approx(1.5), 20)
    assert rows["resnet18: norm statistics over loop"].ratio == pytest.approx(1.0)
    blocks = rows["resnet18: GSNR of elements (VRGD) every 10 steps over bare DDP"]
    assert (blocks.ratio, blocks.repeats) == (pytest.approx((10.5 + 1.1) / 10.5), 2)
    assert not any("fairscale" in case for case in rows)


def test_too_few_turns_for_a_block_give_no_row():
    measurement = Measurement(
        case="resnet18", unit="s/step", values={"bare": [1.0] * 9, "vr": [1.0] * 9}
    )
    assert overhead_rows(measurement) == []


def test_memory_is_compared_process_by_process():
    measurement = Measurement(
        case="resnet18-memory", unit="MiB", values={"bare": [100.0, 102.0], "vr": [150.0, 153.0]}
    )
    (row,) = overhead_rows(measurement)
    assert (row.unit, row.ratio, row.repeats) == ("MiB", pytest.approx(1.5), 2)


def test_interval_of_the_median_by_order_statistics():
    """Ten values: the second and ninth hold with 97.9 %; five can't reach 95 %."""
    assert median_interval([float(n) for n in range(1, 11)]) == (2.0, 9.0)
    assert median_interval([3.0, 1.0, 2.0, 5.0, 4.0]) == (1.0, 5.0)
    assert median_interval([7.0]) == (7.0, 7.0)


@pytest.fixture
def small_steps(monkeypatch):
    monkeypatch.setattr(loops, "PER_WORKER", 2)
    monkeypatch.setattr(loops, "WORKERS", 1)


@pytest.fixture
def steps_taken():
    """Every step of any optimizer of torch's kind."""
    taken = []
    handle = register_optimizer_step_post_hook(lambda optimizer, *_: taken.append(optimizer))
    yield taken
    handle.remove()


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("arm", OURS)
def test_our_loops_take_steps(small_steps, steps_taken, arm, optimizer):
    loop = our_loop(Membership(HashStore(), 0, 1), "resnet18", optimizer, arm, generation=1)
    for _ in range(3):  # Each call ends the step before; the first has none.
        next(loop)
    loop.close()
    assert len(steps_taken) == 2


@pytest.mark.parametrize("theirs", [None, *THEIRS])
def test_bare_loops_take_steps(small_steps, steps_taken, theirs, monkeypatch):
    if theirs is not None and missing(theirs):
        pytest.skip(missing(theirs) or "")
    monkeypatch.setattr(loops, "WORKERS", 2)  # Others refuse a single worker, so they are told two.
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        loop = bare_loop(Membership(HashStore(), 0, 1), "resnet18", "sgd", theirs)
        for _ in range(2):
            next(loop)
        loop.close()
    finally:
        dist.destroy_process_group()
    assert len(steps_taken) >= 2


def test_what_is_not_installed_is_said(monkeypatch):
    monkeypatch.setitem(loops._MODULES, "fairscale", "no_such_module_anywhere")
    assert "fairscale: not measured (ModuleNotFoundError" in (missing("fairscale") or "")


def test_the_command_prints_one_object_a_line_and_refuses_unknown_cases(monkeypatch):
    turns = Measurement(
        case="resnet18",
        unit="s/step",
        values={"bare": TURNS, "loop": TURNS},
        notes=["adaptdl: not measured (it is not there)"],
    )
    monkeypatch.setattr(overhead, "measure", lambda case, seconds: [turns])
    result = CliRunner().invoke(app, ["bench", "overhead", "--quick", "--json"])
    (line,) = result.stdout.strip().splitlines()
    assert set(json.loads(line)) == {
        "bench", "case", "value", "unit", "baseline", "ratio", "repeats"
    }  # fmt: skip
    assert "adaptdl: not measured" in result.stderr
    assert "resnet50-memory" in all_cases()
    with pytest.raises(UserError, match="--case = vgg: must be one of resnet18"):
        overhead.overhead(quick=True, case="vgg")
