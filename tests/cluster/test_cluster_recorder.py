"""Records on their way to a slow storage while another worker becomes the one that writes them."""

from __future__ import annotations

import threading
from pathlib import Path

import pandas as pd
from living import Scene, live
from runs import recipe

from adaptive_platform.cluster.recorder import Recorder
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
