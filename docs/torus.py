"""Draws the grid of the README from the plan itself: python docs/torus.py [FILE]."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

from adaptive_platform.collectives import Plan, TorusConfig
from adaptive_platform.collectives.schedules import Op

WORKERS, NODES = 8, ("node 0", "node 1")
CELL, GAP, LEFT, TOP = 46, 44, 96, 60
STEPS = {
    Op.REDUCE_SCATTER: "1. reduce-scatter along the rows",
    Op.ALL_REDUCE: "2. all-reduce along the columns",
    Op.ALL_GATHER: "3. all-gather along the rows",
}
ROW, COLUMN = "#2f6fb0", "#c2571a"


def main() -> None:
    """Write the picture beside this file, or to the file that is named."""
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".svg")
    nodes = [name for name in NODES for _ in range(WORKERS // len(NODES))]
    target.write_text(draw(TorusConfig().plan(WORKERS, nodes)), encoding="utf-8")


def draw(plan: Plan) -> str:
    """The plan as an SVG: workers in their grid, groups as arrows, phases as a legend."""
    (rows, columns), pitch = plan.grid, CELL + GAP
    place = {
        rank: (LEFT + x * pitch, TOP + y * pitch)
        for y in range(rows)
        for x, rank in enumerate(plan.phases[0].groups[y])
    }
    width, height = LEFT + columns * pitch + 270, TOP + rows * pitch + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="sans-serif" font-size="15">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    half = CELL // 2
    for phase in plan.phases[:2]:
        colour = ROW if phase.op is Op.REDUCE_SCATTER else COLUMN
        for group in phase.groups:
            for here, there in pairwise(group):
                (x1, y1), (x2, y2) = place[here], place[there]
                parts.append(
                    f'<line x1="{x1 + half}" y1="{y1 + half}" x2="{x2 + half}" y2="{y2 + half}" '
                    f'stroke="{colour}" stroke-width="4"/>'
                )
    for y, name in enumerate(NODES):
        top = TOP + y * pitch - 10
        parts.append(
            f'<rect x="{LEFT - 12}" y="{top}" width="{columns * pitch - GAP + 24}" '
            f'height="{CELL + 20}" rx="10" fill="none" stroke="#999999" stroke-dasharray="5 4"/>'
        )
        parts.append(f'<text x="14" y="{top + half + 15}" fill="#444444">{name}</text>')
    for rank, (x, y) in place.items():
        parts.append(
            f'<rect x="{x}" y="{y}" width="{CELL}" height="{CELL}" rx="8" fill="#f4f4f4" '
            'stroke="#444444"/>'
        )
        parts.append(
            f'<text x="{x + half}" y="{y + half + 6}" text-anchor="middle" fill="#111111">'
            f"{rank}</text>"
        )
    parts.append(f'<text x="14" y="28" fill="#111111">{rows} x {columns} torus</text>')
    for number, phase in enumerate(plan.phases):
        colour = COLUMN if phase.op is Op.ALL_REDUCE else ROW
        parts.append(
            f'<text x="{LEFT + columns * pitch}" y="{TOP + 26 + 30 * number}" fill="{colour}">'
            f"{STEPS[phase.op]}</text>"
        )
    share = f"each on 1/{columns} of the gradients"
    parts.append(
        f'<text x="{LEFT + columns * pitch + 18}" y="{TOP + 26 + 30 * len(plan.phases)}" '
        f'fill="#444444" font-size="13">columns: {share}</text>'
    )
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    main()
