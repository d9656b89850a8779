"""Records of a run whose first worker leaves or is killed: each step has its row, once."""

from __future__ import annotations

import threading
from pathlib import Path

import pandas as pd
import torch
from living import KilledError, Scene, live
from report_examples import step_record
from runs import Points, recipe

from adaptive_platform.cluster.recorder import Recorder
from adaptive_platform.errors import UserError
from adaptive_platform.report.journal import Journal


class SlowStorage:
    """Once `slow` is set it takes steps only when `hurry` is."""

    def __init__(self, real, slow: threading.Event, hurry: threading.Event) -> None:
        self._real, self._slow, self._hurry = real, slow, hurry

    def __getattr__(self, name):
        return getattr(self._real, name)

    def open_output_stream(self, path):
        if self._slow.is_set():
            assert self._hurry.wait(60)
        return self._real.open_output_stream(path)


def test_a_first_worker_that_leaves_does_not_write_over_the_next_ones_records(tmp_path):
    """Its last records may still be on their way when it is voted out."""
    slow, hurry = threading.Event(), threading.Event()
    recorders: dict[str, Recorder] = {}

    def observer(name: str) -> Recorder:
        made = Recorder(
            None,
            0.0,
            open_journal=lambda step: Journal(tmp_path, resume_step=step),
            first=name == "a",
        )
        keep = made.keep

        def waits_for_the_storage() -> None:
            if name == "a":
                hurry.set()
            keep()

        made.keep = waits_for_the_storage
        if name == "a":
            journal = Journal(tmp_path, resume_step=0)
            table = journal._tables["steps"]
            table._system = SlowStorage(table._system, slow, hurry)
            made.open(journal)
        recorders[name] = made
        return made

    def trouble(scene: Scene) -> None:
        if scene.step == 4 and scene.member == "a":
            slow.set()
            scene.club.ask_to_leave("a")
        if scene.step == 8:
            recorders["b"].keep()
            hurry.set()

    live(recipe("stop.epochs=2"), 2, trouble, observer=observer)
    for name in "ab":
        recorders[name].close()
    assert list(pd.read_parquet(Path(tmp_path, "steps"))["step"]) == list(range(1, 11))


def test_a_new_first_worker_keeps_records_until_the_storage_answers(tmp_path):
    attempts: list[int] = []

    def open_journal(step: int) -> Journal:
        attempts.append(step)
        if len(attempts) < 3:
            raise UserError("no answer from the storage")
        return Journal(tmp_path, resume_step=step)

    recorder = Recorder(None, 0.0, open_journal=open_journal, first=False)
    recorder.lead([step_record(3), step_record(4)], 4)
    assert recorder.durable_step() == 0, "what nobody has written is not durable"
    recorder.step(step_record(5), 0.5)
    recorder.step(step_record(6), 0.6)
    recorder.close()
    assert attempts == [2, 2, 2]
    assert pd.read_parquet(tmp_path / "steps").step.tolist() == [3, 4, 5, 6]
    events = pd.read_parquet(tmp_path / "events")
    assert events.kind.tolist() == ["warning", "warning"]
    assert events.text.str.contains("no answer from the storage").all()


def test_a_run_killed_after_a_skipped_step_has_each_row_once(tmp_path):
    """The skipped step lies before the checkpoint, so that nobody makes its row again."""
    data = Points(40)
    data.inputs[7] = torch.nan
    config = recipe("stop.epochs=2", "checkpoint.every=0.2 epochs")
    for killed in (True, False):
        recorder = Recorder(None, 60.0)

        def begin(scene: Scene, recorder: Recorder = recorder) -> None:
            run = scene.run
            journal = Journal(
                tmp_path,
                resume_step=run.progress.step,
                skipped=run.state.skipped_in_a_row,
                epoch=run.progress.epoch,
            )
            recorder.open(journal)

        def trouble(scene: Scene, killed: bool = killed) -> None:
            if killed and scene.run.progress.skipped_steps:
                raise KilledError

        lives = live(
            config,
            1,
            trouble,
            data=data,
            run_dir=tmp_path,
            begin=begin,
            observer=lambda name, recorder=recorder: recorder,
        )
        recorder.close()
    rows = pd.read_parquet(tmp_path / "steps")
    assert rows["skipped"].sum() == lives["a"].run.progress.skipped_steps == 2
    for epoch in (0, 1):
        taken = rows["sample_ids"][rows["epoch"] == epoch]
        assert sorted(i for row in taken for share in row for i in share) == list(range(40))
