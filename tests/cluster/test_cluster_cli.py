"""The command as a user types it: exit codes, messages, nothing left behind, signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from adaptive_platform.cli import main
from adaptive_platform.recipe import shipped_recipes

COMMAND = [sys.executable, "-m", "adaptive_platform"]
SMALL = ["model.name=resnet8_cifar", "report.html=false"]


def run(*words: str, cwd: Path, seconds: float = 200) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *words],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


def environment() -> dict[str, str]:
    root = str(Path(__file__).parents[2])
    return os.environ | {"PYTHONPATH": root, "COLUMNS": "200"}


def assert_user_error(result: subprocess.CompletedProcess[str], *parts: str) -> None:
    assert result.returncode == 2, result.stderr
    for part in parts:
        assert part in result.stderr
    assert "Traceback" not in result.stderr + result.stdout


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["quikstart"], ["recipe = quikstart", "Did you mean `quickstart`", "Shipped: "]),
        (["optimizer.lrate=1"], ["optimizer.lrate: there is no such field", "weight_decay"]),
        (["optimiser.lr=1"], ["optimiser: there is no such field", "Did you mean `optimizer`"]),
        (["optimizer.lr=-0.1"], ["optimizer.lr = -0.1", "greater than 0"]),
        (["optimizer.lr=fast"], ["optimizer.lr = 'fast'", "number"]),
        (["batch.kind=nois_scale"], ["batch.kind = nois_scale", "noise_scale", "fixed"]),
        (["workers=0"], ["workers"]),
        (["workers=[3,1]"], ["workers", "min <= max"]),
        (["stop.epochs=-1"], ["stop.epochs = -1"]),
        (["quickstart", "fast"], ["fast: write overrides as field=value"]),
        (["schedule.warmup=5 parsecs"], ["schedule.warmup = '5 parsecs'", "epochs"]),
        (["name=../x"], ["name = '../x'", "pattern"]),
        (["resume=/nowhere/run"], ["resume = /nowhere/run", "no run directory"]),
        (["address=127.0.0.1:9"], ["address = 127.0.0.1:9", "nobody answers"]),
        (["out=/"], ["out = /", "name a folder below it"]),
        (["model.name=resnet51"], ["model.name = 'resnet51'", "resnet50"]),
    ],
)
def test_wrong_words_are_explained_before_ray_starts(words, parts, tmp_path, monkeypatch, capsys):
    """In this process, as `main` is all that the command calls; one more below as a command."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(sys, "argv", ["adaptive-platform", "train", *words])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert all(part in said for part in parts), said
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_word_as_a_command(tmp_path):
    assert_user_error(run("train", "optimizer.lr=-1", cwd=tmp_path), "optimizer.lr = -1")
    assert list(tmp_path.iterdir()) == []


def test_read_only_output(tmp_path):
    """As root every directory is writable; a path below a file is not, for anyone."""
    (tmp_path / "file").write_text("")
    result = run("train", f"out={tmp_path}/file/run", cwd=tmp_path)
    assert_user_error(result, f"out = {tmp_path}/file/run", "can't be written")


def test_a_directory_with_other_things_is_left_alone(tmp_path):
    """A run that never began must not take the user's files with it."""
    (tmp_path / "mine").mkdir()
    thesis = tmp_path / "mine" / "thesis.tex"
    thesis.write_text("years of work")
    assert_user_error(run("train", "out=mine", cwd=tmp_path), "not empty")
    thesis.unlink()
    assert_user_error(run("train", "out=mine", "address=127.0.0.1:9", cwd=tmp_path), "nobody")
    assert (tmp_path / "mine").is_dir()
    assert list((tmp_path / "mine").iterdir()) == []


def test_resume_of_a_file_or_a_cut_recipe(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_bytes(b"name: [\xff")
    assert_user_error(run("train", "resume=run", cwd=tmp_path), "not valid YAML")
    assert_user_error(run("train", "resume=run/recipe.yaml", cwd=tmp_path), "no run directory")


def test_code_in_yaml_never_runs(tmp_path):
    (tmp_path / "evil.yaml").write_text("name: !!python/object/apply:os.system ['touch owned']\n")
    assert_user_error(run("train", "evil.yaml", cwd=tmp_path), "not valid YAML")
    assert not (tmp_path / "owned").exists()


def test_recipes_lists_what_ships(tmp_path):
    result = run("recipes", cwd=tmp_path)
    assert result.returncode == 0
    shipped = shipped_recipes()
    told = [line.split(maxsplit=1) for line in result.stdout.splitlines() if line]
    lines = [words for words in told if words[0] in shipped]
    assert sorted(words[0] for words in lines) == sorted(shipped)
    assert all(len(words[1]) > 10 for words in lines)


def test_report_of_no_run(tmp_path):
    assert_user_error(run("report", str(tmp_path), cwd=tmp_path), str(tmp_path))


def picture(path: Path, shade: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(shade).integers(0, 60, (20, 24, 3))
    Image.fromarray((noise + shade).astype(np.uint8)).save(path)


@pytest.mark.cluster
def test_image_folder_with_a_cut_file(tmp_path):
    """F26 from end to end: the cut file is named once and counted, the rest is trained on."""
    for part in ("train", "val"):
        for index in range(20):
            for name, shade in (("dark", 20), ("light", 150)):
                picture(tmp_path / part / name / f"{index}.jpg", shade)
    cut = tmp_path / "train" / "dark" / "7.jpg"
    cut.write_bytes(cut.read_bytes()[:200])
    result = run(
        "train",
        *SMALL,
        "data.kind=image_folder",
        f"data.train={tmp_path}/train",
        f"data.eval={tmp_path}/val",
        "data.image_size=16",
        "data.decode_workers=1",
        "stop.epochs=2",
        "out=run",
        "batch.global_batch=8",
        "batch.max_batch=16",
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("7.jpg") == 1
    assert "1 broken sample left out" in result.stdout
    steps = pd.read_parquet(tmp_path / "run" / "steps")
    assert steps[steps.epoch == 0].global_batch.sum() == 39


@pytest.mark.cluster
def test_empty_folder_is_refused_and_nothing_is_left(tmp_path):
    (tmp_path / "empty").mkdir()
    result = run(
        "train",
        *SMALL,
        "data.kind=image_folder",
        f"data.train={tmp_path}/empty",
        "out=run",
        cwd=tmp_path,
    )
    assert_user_error(result, f"{tmp_path}/empty")
    assert not (tmp_path / "run").exists()


def started(*words: str, cwd: Path) -> subprocess.Popen[str]:
    """A run of many steps, once its first step line is printed."""
    process = subprocess.Popen(
        [
            *COMMAND,
            "train",
            *SMALL,
            "out=run",
            "stop.steps=100000",
            "lr_rule.kind=none",
            "batch.kind=fixed",
            "batch.global_batch=16",
            *words,
        ],
        cwd=cwd,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "step " in line and "loss" in line:
            break
    return process


@pytest.mark.cluster
def test_leaving_at_once_and_a_closed_terminal_cost_no_checkpoint(tmp_path):
    """Ctrl-C twice leaves at once; what was saved stays. So does it when nobody reads any more."""
    process = started("checkpoint.every=5 steps", cwd=tmp_path)
    assert process.stdout is not None
    process.stdout.close()
    deadline = time.monotonic() + 150
    while len(list(tmp_path.glob("run/checkpoints/step-*/manifest.json"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    time.sleep(6)  # Long enough for lines that nobody reads.
    assert process.poll() is None, "a closed terminal ended the run"
    recipe = (tmp_path / "run" / "recipe.yaml").read_bytes()
    second = run("train", "resume=run", "stop.steps=7", cwd=tmp_path)
    assert_user_error(second, "another process is at work in this run")
    assert (tmp_path / "run" / "recipe.yaml").read_bytes() == recipe
    assert (tmp_path / "run" / ".ray").is_dir()
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    process.wait(60)
    assert list(tmp_path.glob("run/checkpoints/step-*/manifest.json"))


@pytest.mark.cluster
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signal_to_the_command_saves_and_can_be_resumed(number, code, tmp_path):
    process = started("checkpoint={every: 100000 steps, keep_best: false}", cwd=tmp_path)
    assert process.stdout is not None
    time.sleep(1)
    process.send_signal(number)
    output = process.stdout.read()
    assert process.wait(60) == code, output
    assert "adaptive-platform train resume=" in output
    (saved,) = (tmp_path / "run" / "checkpoints").iterdir()
    step = int(saved.name.removeprefix("step-"))
    again = run("train", "resume=run", f"stop.steps={step + 3}", cwd=tmp_path)
    assert again.returncode == 0, again.stdout + again.stderr
    steps = pd.read_parquet(tmp_path / "run" / "steps")
    assert steps.step.tolist() == list(range(1, step + 4))
