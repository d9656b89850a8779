"""The report as Markdown: what happened, key figures, decisions and recipe differences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from adaptive_platform.errors import UserError
from adaptive_platform.report.gains import decision_gains
from adaptive_platform.report.headline import key_figures, recipe_differences, sentences
from adaptive_platform.report.run_data import RunData, labels
from adaptive_platform.report.series import column
from adaptive_platform.report.wording import count, expected_and_realised, format_decision

__all__ = ["render_markdown"]

_MOST_DECISIONS = 20


def render_markdown(runs: Sequence[RunData]) -> str:
    """Text for a pull request or an issue.

    Args:
        runs: What `read_run` gave; several are set side by side.

    Raises:
        UserError: There is no run.
    """
    if not runs:
        raise UserError("report: there is no run to show. Give at least one run directory.")
    names = labels(list(runs))
    figures = [key_figures(run) for run in runs]
    told = list(dict.fromkeys(name for row in figures for name in row))
    blocks = [
        _table(["", *names], [[name, *(row.get(name, "–") for row in figures)] for name in told])
    ]
    for run, name in zip(runs, names, strict=True):
        blocks.append(f"**{_plain(name)}.** {_plain(' '.join(sentences(run)))}")
        blocks += _decisions(run)
    if len(runs) > 1:
        differences = recipe_differences(runs)
        rows = [[f"`{name}`", *values] for name, values in differences.items()]
        blocks.append(_table(["recipe", *names], rows) if rows else "The recipes are the same.")
    return "\n\n".join(blocks) + "\n"


def _decisions(run: RunData) -> list[str]:
    changed = column(run.decisions, "old_batch") != column(run.decisions, "new_batch")
    rows = run.decisions[changed].tail(_MOST_DECISIONS).to_dict("records")
    lines = [f"- {_plain(format_decision({str(k): v for k, v in row.items()}))}" for row in rows]
    if not lines:
        return []
    costs = ("steps", "samples", "seconds")
    gains = [
        [
            str(gain.step),
            f"{count(gain.old_batch)} → {count(gain.new_batch)}",
            *(expected_and_realised(gain, cost) for cost in costs),
        ]
        for gain in decision_gains(run)[-_MOST_DECISIONS:]
    ]
    told = "Cost of the same progress after each change, on before: expected → realised."
    return ["\n".join(lines), told, _table(["step", "batch", *costs], gains)]


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    cells = [[_plain(cell) for cell in row] for row in (head, *rows)]
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    return "\n".join([lines[0], "|" + " --- |" * len(cells[0]), *lines[1:]])


def _plain(text: str) -> str:
    """Text that can neither open a cell nor be taken for HTML."""
    text = " ".join(text.split())
    return text.replace("|", "\\|").replace("<", "&lt;")
