"""Checkpoints appear whole or not at all; the newest valid one is used."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import torch

from adaptive_platform.checkpoints.store import CheckpointStore, read_state
from adaptive_platform.errors import CheckpointError


def state(value: float) -> dict:
    return {"model": {"w": torch.full((1000,), value)}, "run": {"step": value, "name": "x"}}


def newest(store: CheckpointStore) -> tuple[int, dict, list[str]]:
    saved, content, messages = store.load_newest()
    return saved.step, read_state(content), messages


def test_round_trip_and_order(tmp_path):
    store = CheckpointStore(str(tmp_path))
    for step in (3, 20, 100):
        store.save(state(step), step)
    assert [s.step for s in store.saved()] == [3, 20, 100]
    step, content, messages = newest(store)
    assert (step, messages) == (100, [])
    assert torch.equal(content["model"]["w"], torch.full((1000,), 100.0))
    assert content["run"] == {"step": 100, "name": "x"}


def test_writing_is_timed_where_it_succeeds(tmp_path, monkeypatch):
    told = []
    store = CheckpointStore(str(tmp_path), told.append)
    store.save(state(1), 1)
    assert len(told) == 1
    assert told[0] > 0.0

    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space left"):
        store.save(state(2), 2)
    assert len(told) == 1


def test_uri_of_a_file_system(tmp_path):
    store = CheckpointStore(f"file://{tmp_path}/run")
    store.save(state(1), 1)
    assert (tmp_path / "run" / "checkpoints" / "step-00000001" / "state.pt").is_file()


@pytest.mark.parametrize("damage", ["cut", "flip", "no manifest", "no state", "empty manifest"])
def test_damaged_newest_is_passed_over_with_a_message(tmp_path, damage):
    """F21."""
    store = CheckpointStore(str(tmp_path))
    store.save(state(1), 1)
    second = Path(store.save(state(2), 2).path)
    data = bytearray((second / "state.pt").read_bytes())
    if damage == "cut":
        (second / "state.pt").write_bytes(data[: len(data) // 2])
    elif damage == "flip":
        data[len(data) // 2] ^= 1
        (second / "state.pt").write_bytes(data)
    elif damage == "empty manifest":
        (second / "manifest.json").write_text("{}")
    else:
        (second / ("manifest.json" if damage == "no manifest" else "state.pt")).unlink()
    step, content, messages = newest(store)
    assert step == 1
    assert content["run"]["step"] == 1
    # Without its manifest it was never published, so there is nothing to tell.
    assert len(messages) == (damage != "no manifest")
    assert all("step-00000002" in message for message in messages)


def test_none_valid_is_an_error_that_says_why(tmp_path):
    store = CheckpointStore(str(tmp_path))
    second = Path(store.save(state(2), 2).path)
    (second / "state.pt").write_bytes(b"PK")
    with pytest.raises(CheckpointError, match=r"no checkpoint is usable[\s\S]*differs from its"):
        store.load_newest()


def test_nothing_saved_is_none(tmp_path):
    assert CheckpointStore(str(tmp_path)).load_newest() is None


def test_code_in_a_checkpoint_is_refused(tmp_path):
    """A foreign pickle with a matching checksum still can't run code."""

    class Evil:
        def __reduce__(self):
            return (os.system, (f"touch {tmp_path}/owned",))

    store = CheckpointStore(str(tmp_path))
    store.save({"model": Evil()}, 1)
    with pytest.raises(CheckpointError, match="plain tensors"):
        newest(store)
    assert not (tmp_path / "owned").exists()


def test_unknown_format_is_refused(tmp_path):
    store = CheckpointStore(str(tmp_path))
    manifest = Path(store.save(state(1), 1).path) / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 99}))
    with pytest.raises(CheckpointError, match="format 99; this version reads 1"):
        store.load_newest()


def test_failing_storage_leaves_the_last_good_one(tmp_path, monkeypatch):
    store = CheckpointStore(str(tmp_path))
    store.save(state(1), 1)
    real = torch.save

    def full(content, sink):
        real({"half": torch.zeros(10)}, sink)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space left"):
        store.save(state(2), 2)
    assert [s.step for s in store.saved()] == [1]
    assert store.load_newest()[0].step == 1


def test_pruning_keeps_the_newest_and_the_best(tmp_path):
    store = CheckpointStore(str(tmp_path))
    for step in range(1, 7):
        store.save(state(step), step)
    store.prune(2, keep_step=3)
    assert [s.step for s in store.saved()] == [3, 5, 6]


def test_saving_a_step_again(tmp_path):
    store = CheckpointStore(str(tmp_path))
    """Skipped steps move the position and not the step; the older one stays until the newer is."""
    store.save(state(1), 5)
    store.save(state(2), 5)
    assert newest(store)[1]["run"]["step"] == 2
    store.prune(1, keep_step=None)
    assert os.listdir(tmp_path / "checkpoints") == ["step-00000005.1"]


@pytest.mark.parametrize("keep_last", [1, 2])
def test_each_save_of_a_step_has_a_folder_of_its_own(tmp_path, keep_last, monkeypatch):
    store = CheckpointStore(str(tmp_path))
    for value in range(6):
        published = {saved.path for saved in store.saved()}
        saved = store.save(state(value), 5)
        assert saved.path not in published
        store.prune(keep_last, keep_step=None, newest=saved)
        assert newest(store)[1]["run"]["step"] == value

    def full(content, sink):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space left"):
        store.save(state(6), 5)
    assert newest(store)[1]["run"]["step"] == 5
    assert len(store.saved()) == keep_last


def test_saves_where_folders_cannot_be_moved(tmp_path):
    """As on s3: the manifest commits, no folder is renamed."""
    store = CheckpointStore(str(tmp_path))
    moves = []
    real = store._fs

    class Recording:
        def __getattr__(self, name):
            return getattr(real, name)

        def move(self, source, target):
            assert not os.path.isdir(source), "an object store can't move a folder"
            moves.append(target)
            real.move(source, target)

    store._fs = Recording()
    store.save(state(1), 1)
    assert newest(store)[0] == 1
    assert [os.path.basename(target) for target in moves] == ["manifest.json"]


def _save_and_die(run_dir: str) -> None:
    """Dies by SIGKILL after the state and before the manifest of the second checkpoint."""
    store = CheckpointStore(run_dir)
    store.save(state(1), 1)
    real = json.dumps
    json.dumps = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL) or real(*a, **k)
    store.save(state(2), 2)


def test_killed_between_two_files(tmp_path):
    """F21: a real kill; the partial one is never loaded and is cleaned up later."""
    process = multiprocessing.get_context("spawn").Process(
        target=_save_and_die, args=(str(tmp_path),)
    )
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    store = CheckpointStore(str(tmp_path))
    assert len(os.listdir(tmp_path / "checkpoints")) == 2
    assert store.load_newest()[0].step == 1
    assert store.clean_partial() == 1
    assert os.listdir(tmp_path / "checkpoints") == ["step-00000001"]


def test_going_back_past_a_damaged_one_does_not_cost_the_next_good_one(tmp_path):
    store = CheckpointStore(str(tmp_path))
    store.save(state(50), 50)
    damaged = Path(store.save(state(100), 100).path)
    (damaged / "state.pt").write_bytes(b"PK")
    assert newest(store)[0] == 50
    store.save(state(60), 60)
    store.prune(1, keep_step=None)
    assert newest(store)[0] == 60


class Refusing:
    """A storage that fails for one file, and then no more."""

    def __init__(self, real, path):
        self._real, self.path = real, path

    def __getattr__(self, name):
        return getattr(self._real, name)

    def open_input_stream(self, path):
        if path == self.path:
            raise OSError(5, "Input/output error")
        return self._real.open_input_stream(path)


@pytest.mark.parametrize("file", ["state.pt", "manifest.json"])
def test_what_the_storage_does_not_give_now_is_passed_over_and_stays(tmp_path, file):
    store = CheckpointStore(str(tmp_path))
    store.save(state(50), 50)
    good = store.save(state(100), 100)
    store._fs = storage = Refusing(store._fs, f"{good.path}/{file}")
    step, _, (message,) = newest(store)
    assert step == 50
    assert "Input/output error" in message
    assert "It is left where it is. Going back to an older one." in message
    for step in (60, 70):
        saved = store.save(state(step), step)
        store.prune(1, keep_step=None, newest=saved)
    assert [s.step for s in store.saved()] == [70, 100], "it counts for nothing, and stays"
    storage.path = ""
    assert newest(store)[0] == 100


def test_a_newer_versions_checkpoint_is_passed_over_and_stays(tmp_path):
    store = CheckpointStore(str(tmp_path))
    store.save(state(1), 1)
    manifest = Path(store.save(state(2), 2).path) / "manifest.json"
    manifest.write_text('{"format": 2, "shards": 8}')
    step, _, (message,) = newest(store)
    assert step == 1
    assert "format 2; this version reads 1. It is left where it is." in message
    assert [s.step for s in store.saved()] == [1, 2]


def test_of_several_newer_ones_only_the_damaged_go(tmp_path):
    store = CheckpointStore(str(tmp_path))
    for step in (1, 2, 3):
        store.save(state(step), step)
    _, refused, damaged = store.saved()
    Path(damaged.path, "state.pt").write_bytes(b"PK")
    store._fs = Refusing(store._fs, f"{refused.path}/state.pt")
    step, _, messages = newest(store)
    assert step == 1
    assert [message.split(". ")[-2] for message in messages] == [
        "It is removed",
        "It is left where it is",
    ]
    assert [s.step for s in store.saved()] == [1, 2]


@pytest.mark.parametrize("manifest", ["{}", "[]", '{"format": 1}', '{"format": 1, "files": 3}'])
def test_a_manifest_that_says_nothing_is_passed_over(tmp_path, manifest):
    store = CheckpointStore(str(tmp_path))
    store.save(state(1), 1)
    second = Path(store.save(state(2), 2).path)
    (second / "manifest.json").write_text(manifest)
    assert newest(store)[0] == 1


def test_what_the_storage_said_is_not_hidden_by_torch(tmp_path):
    """A full disk is an OSError, which the run survives, and not torch's RuntimeError."""
    store = CheckpointStore(str(tmp_path))
    real = store._fs

    class Full:
        def __getattr__(self, name):
            return getattr(real, name)

        def open_output_stream(self, path):
            stream = real.open_output_stream(path)

            class Stream:
                def __enter__(self):
                    return self

                def __exit__(self, *_):
                    stream.close()

                def write(self, data):
                    raise OSError(28, "No space left on device")

                def flush(self):
                    pass

            return Stream()

    store._fs = Full()
    with pytest.raises(OSError, match="No space left"):
        store.save(state(1), 1)
