"""Lint, format, types and import arrows, as part of the one test line."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOOLS = Path(sys.executable).parent


@pytest.mark.parametrize(
    "words",
    [
        ["ruff", "check", "."],
        ["ruff", "format", "--check", "."],
        ["mypy"],
        ["lint-imports"],
    ],
    ids=lambda words: " ".join(words),
)
def test_tool_finds_nothing(words):
    result = subprocess.run(
        [str(TOOLS / words[0]), *words[1:]], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_modules_offer_only_what_they_define():
    """Whoever needs something imports it from where it is; packages' doors are the exception."""
    found = {}
    for path in (ROOT / "adaptive_platform").rglob("*.py"):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        imports = [node for node in body if isinstance(node, (ast.Import, ast.ImportFrom))]
        imported = {alias.asname or alias.name for node in imports for alias in node.names}
        offered = {
            name
            for node in body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
            for name in ast.literal_eval(node.value)
        }
        if path.name != "__init__.py" and offered & imported:
            found[str(path.relative_to(ROOT))] = sorted(offered & imported)
    assert found == {}


def test_importing_the_package_costs_no_heavy_import():
    """Importing has no side effects, and the doors are opened only when used."""
    code = (
        "import sys, adaptive_platform, adaptive_platform.cli\n"
        "heavy = {'torch', 'torchvision', 'ray', 'pandas', 'plotly', 'sklearn', 'scipy'}\n"
        "sys.exit(' '.join(heavy & set(sys.modules)) or 0)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, f"imported: {result.stderr}"


def test_what_a_worker_imports_stays_lean():
    """Start-up is dominated by imports: none of these belong on the way to the first step."""
    code = (
        "import sys, adaptive_platform.cluster.worker\n"
        "heavy = {'plotly', 'sklearn', 'scipy', 'matplotlib', 'torchvision'}\n"
        "sys.exit(' '.join(heavy & set(sys.modules)) or 0)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, f"imported: {result.stderr}"
