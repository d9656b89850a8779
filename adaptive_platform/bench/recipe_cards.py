"""Writes what `bench recipes` measured into the cards of the recipes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from adaptive_platform.bench.recipe_pages import TARGET, Lines, by_arm, cell, column
from adaptive_platform.errors import UserError

__all__ = ["write_cards"]

_BEGIN, _END = "<!-- measured -->", "<!-- /measured -->"


def write_cards(
    lines: Lines, folder: Path, *, arms_of: Mapping[str, Sequence[str]], reference: str
) -> None:
    """Renew the part between `<!-- measured -->` and `<!-- /measured -->` of each card.

    Args:
        lines: One mapping per run, as `bench recipes` records them.
        folder: Holds `<recipe>.md`.
        arms_of: Arms of each recipe, in the order of its table.
        reference: Arm that each table begins with.

    Raises:
        UserError: A card is missing, or has no such part; none is written then.
    """
    found = by_arm(lines)
    written = {}
    for recipe, arms in arms_of.items():
        path = folder / f"{recipe}.md"
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        table = _table({arm: found[arm] for arm in (reference, *arms) if arm in found})
        part = f"{_BEGIN}\n{table}\n{_END}"
        renewed, parts = re.subn(f"{_BEGIN}.*?{_END}", part.replace("\\", r"\\"), text, flags=re.S)
        if parts != 1:
            raise UserError(
                f"cards = {folder}: {path.name} needs one part between {_BEGIN} and {_END}."
            )
        written[path] = renewed
    for path, text in written.items():
        path.write_text(text, encoding="utf-8")


def _table(rows: Mapping[str, Lines]) -> str:
    head = ["arm", "accuracy in %", "steps", f"steps to {TARGET:.0%}", "KiB sent per step"]
    table = [head, ["---"] * len(head)]
    for arm, mine in rows.items():
        table.append([
            arm,
            cell(column(mine, "accuracy"), ".1f", 100.0),
            cell(column(mine, "steps"), ".0f"),
            cell(column(mine, "steps_to_target"), ".0f"),
            cell(column(mine, "bytes_per_step"), ".1f", 1 / 1024),
        ])  # fmt: skip
    return "\n".join(f"| {' | '.join(row)} |" for row in table)
