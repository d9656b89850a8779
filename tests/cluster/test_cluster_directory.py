"""Who holds a run directory may change it; everybody else leaves it as it is."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from adaptive_platform.cluster.directory import RunDirectory, discard
from adaptive_platform.errors import UserError
from adaptive_platform.recipe import Recipe, load_recipe

BUSY = "another process is at work in this run"


def recipe(*words: str) -> Recipe:
    return load_recipe("quickstart", list(words))


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_second_process_that_is_refused_changes_nothing(tmp_path):
    run_dir = tmp_path / "run"
    with RunDirectory.taken(recipe(f"out={run_dir}")) as directory:
        directory.keep()
        (run_dir / ".ray").mkdir()
        (run_dir / ".ray" / "state").write_text("of the run under way")
        before = content(run_dir)
        with (
            pytest.raises(UserError, match=BUSY),
            RunDirectory.taken(recipe(f"resume={run_dir}", "stop.steps=7")),
        ):
            pass
        with pytest.raises(UserError, match=BUSY):
            discard(str(run_dir))
        assert content(run_dir) == before
    assert list(content(run_dir)) == ["recipe.yaml"]


def test_one_that_is_refused_before_the_first_has_written_changes_nothing_either(
    tmp_path, monkeypatch
):
    run_dir = tmp_path / "run"
    real = RunDirectory._clear
    refused = []

    def clear(self, system, root):
        """The first one gives up; at this moment its directory is as empty as a new one."""
        (run_dir / "recipe.yaml").unlink()
        try:
            with RunDirectory.taken(recipe(f"out={run_dir}")):
                pass
        except UserError as error:
            refused.append(str(error))
        assert (run_dir / ".lock").is_file()
        return real(self, system, root)

    monkeypatch.setattr(RunDirectory, "_clear", clear)
    with RunDirectory.taken(recipe(f"out={run_dir}")):
        pass
    (message,) = refused
    assert BUSY in message
    assert not run_dir.exists()


@pytest.mark.parametrize("outer", ["run", "a/b/run"])
@pytest.mark.parametrize("error", [None, UserError("nobody answers"), KeyboardInterrupt()])
def test_a_run_that_never_began_leaves_what_was_there(tmp_path, outer, error):
    def try_it() -> None:
        with RunDirectory.taken(recipe(f"out={tmp_path / outer}")):
            (tmp_path / outer / "steps").mkdir()
            if error is not None:
                raise error

    for before in ([], [tmp_path / outer.split("/")[0]]):
        for path in before:
            (tmp_path / outer).mkdir(parents=True)
            assert path.is_dir()
        with suppress(UserError, KeyboardInterrupt):
            try_it()
        assert list(tmp_path.iterdir()) == before
    assert list((tmp_path / outer).iterdir()) == []


def test_a_resumed_run_that_never_began_has_its_recipe_back(tmp_path):
    run_dir = tmp_path / "run"
    with RunDirectory.taken(recipe(f"out={run_dir}")) as directory:
        directory.keep()
    before = content(run_dir)
    with RunDirectory.taken(recipe(f"resume={run_dir}", "stop.steps=7")):
        assert content(run_dir)["recipe.yaml"] != before["recipe.yaml"]
    assert content(run_dir) == before


def test_a_lock_that_a_killed_process_left_keeps_nobody_out(tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / ".lock").touch()
    with RunDirectory.taken(recipe(f"out={run_dir}")) as directory:
        directory.keep()
    assert list(content(run_dir)) == ["recipe.yaml"]


def test_a_lock_that_is_given_back_while_another_one_opens_it_is_taken_anew(tmp_path, monkeypatch):
    """Else both would hold a lock: one of the old file and one of the new."""
    import fcntl

    run_dir = tmp_path / "run"
    real, calls = fcntl.flock, []

    def flock(file, how):
        if not calls:
            (run_dir / ".lock").unlink()  # as the holder does between our two calls
        calls.append(file)
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with RunDirectory.taken(recipe(f"out={run_dir}")):
        assert len(calls) == 2
        with (
            pytest.raises(UserError, match=BUSY),
            RunDirectory.taken(recipe(f"resume={run_dir}")),
        ):
            pass
