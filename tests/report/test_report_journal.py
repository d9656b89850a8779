from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.fs
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from report_examples import step_record

from adaptive_platform.errors import UserError
from adaptive_platform.report import (
    DecisionRecord,
    EvalRecord,
    EventRecord,
    Journal,
    JournalError,
)
from adaptive_platform.report.parts import PartTable, arrow_schema, read_table
from adaptive_platform.report.records import StepRecord
from adaptive_platform.report.run_data import read_run

DESIGN_COLUMNS = [
    "step",
    "epoch",
    "samples_seen",
    "scale_invariant_step",
    "world_size",
    "global_batch",
    "microbatch",
    "accumulation",
    "lr",
    "gain",
    "loss",
    "grad_sqnorm",
    "noise_scale",
    "gsnr",
    "efficiency",
    "samples_per_second",
    "step_seconds",
    "data_seconds",
    "reduce_seconds",
    "statistics_seconds",
    "skipped",
]


def steps_of(run_dir: Path) -> list[int]:
    return pd.read_parquet(run_dir / "steps")["step"].tolist()


def test_pandas_reads_the_contract_columns_in_one_call(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path))
    journal.step(step_record(1, noise_scale=12.5, sample_ids=[[3, 1], [2]]))
    journal.step(step_record(2, skipped=True, loss=float("nan")))
    journal.flush()
    frame = pd.read_parquet(tmp_path / "steps")
    assert set(DESIGN_COLUMNS) <= set(frame.columns)
    assert frame["noise_scale"].iloc[0] == 12.5
    assert pd.isna(frame["noise_scale"].iloc[1])
    assert [list(ids) for ids in frame["sample_ids"].iloc[0]] == [[3, 1], [2]]
    assert frame["skipped"].tolist() == [False, True]


def test_columns_keep_their_types_without_rows_and_without_values(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path))
    empty = pd.read_parquet(tmp_path / "steps")
    assert len(empty) == 0
    assert empty["noise_scale"].dtype == "float64"
    journal.step(step_record(1))
    journal.flush()
    frame = pd.read_parquet(tmp_path / "steps")
    assert frame["noise_scale"].dtype == "float64"
    assert frame["step"].dtype == "int64"
    assert frame["skipped"].dtype == "bool"


def test_all_tables_are_written(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path))
    at: dict[str, Any] = {"step": 3, "epoch": 0, "samples_seen": 96}
    journal.decision(
        DecisionRecord(**at, kind="noise_scale", old_batch=32, new_batch=64, reason="noise")
    )
    journal.evaluation(EvalRecord(**at, loss=1.0, accuracy=0.5, samples=10))
    journal.event(EventRecord(time=1.0, step=3, kind="resize", text="2 to 1 workers"))
    assert journal.num_pending == 3
    journal.flush()
    assert journal.num_pending == 0
    assert pd.read_parquet(tmp_path / "decisions")["new_batch"].tolist() == [64]
    assert pd.read_parquet(tmp_path / "evals")["accuracy"].tolist() == [0.5]
    assert pd.read_parquet(tmp_path / "events")["text"].tolist() == ["2 to 1 workers"]


# A part that is cut to nothing must not keep the step of its old first row.
@example(
    attempts=[([0, 0, 0], 0.0), ([0] * 8 + [1, 1, 0, 0], 0.0), ([2], 0.0), ([0], 0.5)], fan_in=2
)
@settings(max_examples=40, deadline=None)
@given(
    attempts=st.lists(
        st.tuples(st.lists(st.integers(0, 7), min_size=1, max_size=12), st.floats(0, 1)),
        min_size=1,
        max_size=4,
    ),
    fan_in=st.integers(2, 4),
)
def test_any_attempts_read_back_as_one_uninterrupted_run(
    attempts: list[tuple[list[int], float]], fan_in: int
) -> None:
    """Each attempt flushes groups of steps, is killed, and the next resumes somewhere before."""
    system = pyarrow.fs.LocalFileSystem()
    with tempfile.TemporaryDirectory() as root:
        folder = os.path.join(root, "steps")
        expected: list[tuple[int, float]] = []
        for attempt, (groups, resume_at) in enumerate(attempts):
            table = PartTable(system, folder, StepRecord, fan_in=fan_in, largest=fan_in**2)
            resume_step = int(resume_at * len(expected))
            table.truncate(resume_step)
            del expected[resume_step:]
            for size in groups:
                steps = range(len(expected) + 1, len(expected) + size + 1)
                table.append([step_record(step, loss=float(attempt)) for step in steps])
                expected += [(step, float(attempt)) for step in steps]
            frame = pd.read_parquet(folder)
            assert list(zip(frame["step"], frame["loss"], strict=True)) == expected


def test_a_week_of_flushes_does_not_leave_a_week_of_files(tmp_path: Path) -> None:
    table = PartTable(
        pyarrow.fs.LocalFileSystem(), str(tmp_path / "t"), EventRecord, fan_in=4, largest=16
    )
    for step in range(200):
        table.append([EventRecord(time=0.0, step=step, kind="warning", text="")])
    # 200 = 12 * 16 + 2 * 4: twelve large parts, two middle ones.
    assert table.num_parts == len(list((tmp_path / "t").iterdir())) == 14
    assert pd.read_parquet(tmp_path / "t")["step"].tolist() == list(range(200))


def test_a_skipped_step_shares_its_number_and_both_rows_are_cut_together(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path))
    for record in (step_record(1), step_record(2, skipped=True), step_record(2), step_record(3)):
        journal.step(record)
    journal.flush()
    assert steps_of(tmp_path) == [1, 2, 2, 3]
    Journal(str(tmp_path), 1)
    assert steps_of(tmp_path) == [1]


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("skipped", [0, 1, 2, 3])
def test_rows_of_steps_skipped_before_the_checkpoint_stay(
    tmp_path: Path, skipped: int, merged: bool
) -> None:
    journal = Journal(str(tmp_path))
    rows = [(1, 0), (2, 0), (3, 1), (3, 2), (3, 3), (3, 0), (4, 4), (4, 0)]
    for step, number in rows:
        record = step_record(step, skipped=bool(number), sample_ids=[[number]])
        journal.step(record)
        if not merged:
            journal.flush()
    journal.flush()
    Journal(str(tmp_path), 2, skipped=skipped)
    left = pd.read_parquet(tmp_path / "steps")
    ids = [share[0][0] for share in left["sample_ids"]]
    assert list(zip(left["step"], ids, strict=True)) == rows[: 2 + skipped]


@pytest.mark.parametrize(("epoch", "left"), [(None, [0, 1, 2]), (2, [0, 1, 2]), (1, [0, 1])])
def test_scores_of_a_later_pass_go_though_all_its_steps_were_skipped(
    tmp_path: Path, epoch: int | None, left: list[int]
) -> None:
    journal = Journal(str(tmp_path))
    for step, at in ((4, 0), (5, 1), (5, 2), (6, 2)):
        journal.evaluation(EvalRecord(step=step, epoch=at, samples_seen=step, loss=1.0))
        journal.flush()
    Journal(str(tmp_path), 5, epoch=epoch)
    assert pd.read_parquet(tmp_path / "evals")["epoch"].tolist() == left


def test_resuming_keeps_events_and_cuts_decisions_and_evaluations(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path))
    for step in (5, 10):
        at: dict[str, Any] = {"step": step, "epoch": 0, "samples_seen": step}
        journal.step(step_record(step))
        journal.decision(DecisionRecord(**at, kind="x", old_batch=1, new_batch=2, reason=""))
        journal.evaluation(EvalRecord(**at, loss=1.0))
        journal.event(EventRecord(time=0.0, step=step, kind="resize", text=""))
    journal.flush()
    Journal(str(tmp_path), 7)
    lengths = {
        name: len(pd.read_parquet(tmp_path / name))
        for name in ("steps", "decisions", "evals", "events")
    }
    assert lengths == {"steps": 1, "decisions": 1, "evals": 1, "events": 2}


def test_a_writer_that_was_taken_for_lost_overwrites_nothing(tmp_path: Path) -> None:
    frozen = Journal(tmp_path)
    for step in (1, 2):
        frozen.step(step_record(step))
        frozen.flush()
    follower = Journal(tmp_path, resume_step=2)
    frozen.step(step_record(3))
    for step in (3, 4):
        follower.step(step_record(step))
        follower.flush()
    frozen.flush()  # it was in the middle of this when it stood still
    assert set(steps_of(tmp_path)) == {1, 2, 3, 4}
    assert sorted(steps_of(tmp_path)) == [1, 2, 3, 3, 4]
    (tmp_path / "recipe.yaml").write_text("name: frozen\n")
    assert read_run(tmp_path).steps.step.tolist() == [1, 2, 3, 4]


def test_a_new_run_refuses_a_directory_with_records(tmp_path: Path) -> None:
    Journal(str(tmp_path))
    with pytest.raises(UserError, match=r"already holds the records of a run.*resume="):
        Journal(str(tmp_path))


def test_a_directory_that_cannot_be_written_is_refused_with_the_fix(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match=r"can't be used as run directory.*out=DIR"):
        Journal(str(tmp_path / "file"))


def test_uris_work_like_paths(tmp_path: Path) -> None:
    journal = Journal(f"file://{tmp_path}/run")
    journal.step(step_record(1))
    journal.flush()
    assert steps_of(tmp_path / "run") == [1]


def test_an_unknown_file_system_is_refused() -> None:
    with pytest.raises(UserError, match="no file system for this address"):
        Journal("gopher://host/run")


def test_a_temporary_file_of_a_killed_writer_is_not_read_and_goes(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path))
    journal.step(step_record(1))
    journal.flush()
    left = tmp_path / "steps" / "_part-00000002-00000002-0000000002.parquet.tmp"
    left.write_bytes(b"PAR1 half a part")
    assert steps_of(tmp_path) == [1]
    Journal(str(tmp_path), 1)
    assert not left.exists()


@pytest.mark.parametrize("killed_at", ["open_output_stream", "move", "delete_file"])
def test_a_kill_at_any_call_loses_nothing_that_was_flushed(tmp_path: Path, killed_at: str) -> None:
    """Each fourth append merges; the process dies at the last call of one kind."""

    class Killed(BaseException):
        pass

    class Storage:
        def __init__(self) -> None:
            self.system = pyarrow.fs.LocalFileSystem()
            self.armed = False

        def __getattr__(self, name: str) -> Any:
            if self.armed and name == killed_at:
                raise Killed
            return getattr(self.system, name)

    storage = Storage()
    folder = str(tmp_path / "steps")
    table = PartTable(storage, folder, StepRecord, fan_in=4)
    for step in (1, 2, 3):
        table.append([step_record(step)])
    storage.armed = True
    with pytest.raises(Killed):
        table.append([step_record(4)])
    survivor = PartTable(pyarrow.fs.LocalFileSystem(), folder, StepRecord, fan_in=4)
    kept = pd.read_parquet(folder)["step"].tolist()
    assert kept == ([1, 2, 3, 4] if killed_at == "delete_file" else [1, 2, 3])
    survivor.append([step_record(kept[-1] + 1)])
    assert pd.read_parquet(folder)["step"].tolist() == [*kept, kept[-1] + 1]
    assert not [name for name in os.listdir(folder) if name.startswith("_")]


def test_a_storage_that_fails_keeps_the_rows_for_the_next_flush(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path))
    (tmp_path / "steps").rename(tmp_path / "away")
    (tmp_path / "steps").write_text("a file where the folder was")
    journal.step(step_record(1))
    journal.event(EventRecord(time=0.0, step=1, kind="warning", text="disk"))
    with pytest.raises(JournalError, match="1 of steps"):
        journal.flush()
    assert journal.num_pending == 1
    assert len(pd.read_parquet(tmp_path / "events")) == 1
    (tmp_path / "steps").unlink()
    (tmp_path / "away").rename(tmp_path / "steps")
    journal.step(step_record(2))
    journal.flush()
    assert steps_of(tmp_path) == [1, 2]


def test_a_merge_that_fails_costs_nothing(tmp_path: Path) -> None:
    class Storage:
        """Refuses to remove files, as some policies do."""

        def __init__(self) -> None:
            self.system = pyarrow.fs.LocalFileSystem()
            self.refuse = True

        def __getattr__(self, name: str) -> Any:
            return getattr(self.system, name)

        def delete_file(self, path: str) -> None:
            if self.refuse:
                raise PermissionError(path)
            self.system.delete_file(path)

    storage = Storage()
    folder = str(tmp_path / "steps")
    table = PartTable(storage, folder, StepRecord, fan_in=3)
    for step in range(1, 8):
        table.append([step_record(step)])
    storage.refuse = False
    PartTable(storage, folder, StepRecord, fan_in=3)
    assert pd.read_parquet(folder)["step"].tolist() == list(range(1, 8))


def test_workers_that_write_records_import_nothing_heavy() -> None:
    heavy = ["pandas", "plotly", "matplotlib", "rich", "torch", "pyarrow", "ray"]
    code = (
        "import sys, adaptive_platform.report, adaptive_platform.report.journal\n"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"


def test_records_that_come_during_a_flush_are_kept(tmp_path: Path) -> None:
    """A flush may run in a thread of its own, so that storage never holds up a step."""
    journal = Journal(tmp_path)
    table = journal._tables["steps"]
    append = table.append

    def append_while_training_goes_on(rows: Any) -> None:
        journal.step(step_record(2))
        append(rows)

    journal.step(step_record(1))
    table.append = append_while_training_goes_on  # type: ignore[method-assign]
    journal.flush()
    assert journal.num_pending == 1
    table.append = append  # type: ignore[method-assign]
    journal.flush()
    assert steps_of(tmp_path) == [1, 2]


def test_reading_while_parts_are_merged_sees_every_row(tmp_path: Path) -> None:
    folder = str(tmp_path / "steps")
    writer = PartTable(pyarrow.fs.LocalFileSystem(), folder, StepRecord, fan_in=4)
    for step in (1, 2, 3):
        writer.append([step_record(step)])

    class Storage:
        """The fourth part comes, and all are merged, after the reader has listed the first."""

        def __init__(self) -> None:
            self.system = pyarrow.fs.LocalFileSystem()
            self.merged = False

        def __getattr__(self, name: str) -> Any:
            if name == "open_input_file" and not self.merged:
                self.merged = True
                writer.append([step_record(4)])
            return getattr(self.system, name)

    rows = read_table(Storage(), folder, arrow_schema(StepRecord))
    assert rows["step"].to_pylist() == [1, 2, 3, 4]


@pytest.mark.parametrize("content", [b"", b"PAR1", b"\0" * 400])
def test_a_part_damaged_by_a_power_cut_does_not_stop_the_resumed_run(
    tmp_path: Path, content: bytes
) -> None:
    journal = Journal(tmp_path)
    for step in (1, 2, 3):
        journal.step(step_record(step))
        journal.flush()
    newest = max((tmp_path / "steps").glob("part-*"))
    newest.write_bytes(content)
    journal = Journal(tmp_path, 3)
    assert journal.damaged == [f"steps/{newest.name}"]
    assert (tmp_path / "steps" / f"_damaged-{newest.name}").read_bytes() == content
    journal.step(step_record(4))
    journal.flush()
    assert steps_of(tmp_path) == [1, 2, 4]


def test_a_damaged_part_does_not_stop_a_merge(tmp_path: Path) -> None:
    folder = tmp_path / "steps"
    table = PartTable(pyarrow.fs.LocalFileSystem(), str(folder), StepRecord, fan_in=4)
    for step in (1, 2, 3):
        table.append([step_record(step)])
    sorted(folder.iterdir())[1].write_bytes(b"")
    table.append([step_record(4)])
    assert table.num_parts == 1
    assert len(table.damaged) == 1
    assert pd.read_parquet(folder)["step"].tolist() == [1, 3, 4]
