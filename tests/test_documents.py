"""What the documents show is true: commands parse, code runs, links exist."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from adaptive_platform.cli import split_words
from adaptive_platform.recipe import apply_overrides, load_recipe, parse_overrides, shipped_recipes

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("experiments/**/*.md")])


def blocks(language: str) -> list[tuple[str, str]]:
    found = []
    for document in DOCUMENTS:
        pattern = rf"```{language}\n(.*?)```"
        found += [(document.name, b) for b in re.findall(pattern, document.read_text(), re.S)]
    return found


def train_commands() -> list[list[str]]:
    lines = [line for _, block in blocks("bash") for line in block.splitlines()]
    found = []
    for line in lines:
        words = shlex.split(line, comments=True)
        for start in (["adaptive-platform", "train"], ["-m", "adaptive_platform", "train"]):
            for index in range(len(words)):
                if words[index : index + len(start)] == start:
                    found.append(words[index + len(start) :])
    return found


@pytest.mark.parametrize("words", train_commands(), ids=" ".join)
def test_train_commands_name_real_recipes_and_fields(words):
    recipe, overrides = split_words(words)
    overrides = [word for word in overrides if not word.startswith("resume=")]
    if recipe is not None and recipe.endswith(".yaml"):
        content = load_recipe("quickstart").model_dump(mode="json")
        load_recipe(apply_overrides(content, parse_overrides(overrides)))
    else:
        load_recipe(recipe or "quickstart", overrides)


def test_commands_were_found():
    assert len(train_commands()) >= 5


@pytest.mark.parametrize(("name", "code"), blocks("python"))
def test_python_blocks_compile(name, code):
    compile(code, name, "exec")


def test_the_controller_of_the_guide_works():
    """CONTRIBUTING's controller, pasted into a file, decides within the limits."""
    (code,) = [b for name, b in blocks("python") if "DoubleOnceConfig" in b]
    header = (
        "from typing import Literal\nfrom pydantic import Field\n"
        "from adaptive_platform.controllers import *\n"
        "from adaptive_platform.controllers.controller import settle\n"
    )
    # Run in a process of its own: defining the class adds a kind for all later tests.
    script = (
        header
        + code
        + (
            "\nfrom adaptive_platform.progress import Progress\n"
            "from adaptive_platform.summary import GradientSummary\n"
            "def decide(samples):\n"
            "    return DoubleOnceConfig(global_batch=64).build().decide(Observation(\n"
            "        progress=Progress(dataset_size=100, samples=samples), global_batch=64,\n"
            "        summary=GradientSummary(), limits=Limits(dataset_size=100)))\n"
            "assert decide(0).global_batch == 64\n"
            "assert decide(10_000).global_batch == 100, decide(10_000)\n"
            "print(decide(10_000).reason)\n"
        )
    )
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "data size of 100 caps the batch" in result.stdout


def test_links_point_at_files():
    for document in DOCUMENTS:
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", document.read_text()):
            path = document.parent / target
            assert path.exists(), f"{document.name}: {target}"
            assert path.stat().st_size > 0, f"{document.name}: {target} is empty"


def test_ci_runs_the_readme_line():
    readme = (ROOT / "README.md").read_text()
    assert readme.count("<!-- test-line -->") == 1
    assert "README.md" in (ROOT / ".ci" / "run").read_text()


def test_recipes_have_the_name_of_their_file():
    for name in shipped_recipes():
        content = yaml.safe_load((ROOT / "experiments" / "recipes" / f"{name}.yaml").read_text())
        assert content["name"] == name


def test_the_picture_of_the_grid_shows_the_plan(tmp_path):
    """`docs/torus.py` draws it from the plan, so it can't show another grid than the code's."""
    target = tmp_path / "torus.svg"
    script = str(ROOT / "docs" / "torus.py")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, script, str(target)], check=True, env=environment)
    assert target.read_text() == (ROOT / "docs" / "torus.svg").read_text()


def test_every_picture_of_the_guides_is_made_by_the_script_and_shown():
    script = (ROOT / "docs" / "screenshots.py").read_text()
    shown = "".join(document.read_text() for document in DOCUMENTS)
    for picture in [*ROOT.glob("docs/*.png"), *ROOT.glob("docs/*.svg")]:
        assert f'"{picture.name}"' in script, f"{picture.name}: the script does not make it"
        assert re.search(rf"\((docs/)?{picture.name}\)", shown), f"{picture.name}: nobody shows it"
