"""Small and large batches on digits, and how sharp their minima are (Keskar et al. 2016).

    python experiments/studies/sharpness_digits.py

Trains the recipes `keskar-2016-small` and `keskar-2016`, and the large batch again for three times
as long, on several seeds in one process of one thread. The sharpness of each minimum is taken as in
`sharpness.py`, over the first training samples: in the whole space, and in a random subspace.
Each finished run is a line of `sharpness-digits.jsonl`, so a study that is stopped goes on where it
was; `sharpness-digits.md` is written anew at the end.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from controllers import Keeper, cell, losses
from sharpness import EPSILONS, directions
from torch.distributed import HashStore

from adaptive_platform.collectives import Membership
from adaptive_platform.recipe import load_recipe
from adaptive_platform.statistics.sharpness import sharpness
from adaptive_platform.training.landscape import Landscape
from adaptive_platform.training.run import TrainingRun

HERE = Path(__file__).parent
NAME = "sharpness-digits"
ARMS: dict[str, tuple[str, list[str]]] = {
    "small": ("keskar-2016-small", []),
    "large": ("keskar-2016", []),
    "large, three times as long": ("keskar-2016", ["stop.epochs=30"]),
}
"""Recipe and changes of each row."""
DIRECTIONS = 100
"""Of the random subspace, as in the paper."""


def measured(arm: str, seed: int, samples: int) -> dict[str, Any]:
    """One run to its end, and the sharpness of where it ended."""
    name, changes = ARMS[arm]
    recipe = load_recipe(name, [*changes, f"seed={seed}", "report.evaluate_every=1 epochs"])
    # Two workers with batch norms of their own, as the recipe has it: micro-batches here.
    recipe = recipe.model_copy(update={"microbatch": recipe.batch.global_batch // 2})
    source = recipe.data.open()
    model = recipe.model.build(len(source.classes), seed)
    keeper = Keeper()
    run = TrainingRun(
        recipe, model, source, recipe.data, Membership(HashStore(), 0, 1), observer=keeper
    )
    try:
        for part in run:
            outputs = run.model(part.inputs)
            run.backward(losses(outputs, part.targets), outputs)
    finally:
        run.close()
    loss = recipe.loss.build_evaluation()
    landscape = Landscape(model, source.train, recipe.data, loss, limit=samples)
    at = landscape.parameters()
    line: dict[str, Any] = {
        "batch": recipe.batch.global_batch,
        "steps": keeper.steps[-1].step,
        "loss": landscape(at)[0],
        "accuracy": keeper.evals[-1].accuracy,
    }
    for key, columns in (("whole", None), ("subspace", directions(landscape, DIRECTIONS, seed))):
        for epsilon in EPSILONS:
            found = sharpness(landscape, at, epsilon=epsilon, directions=columns, seed=seed)
            line[f"{key} {epsilon:g}"] = found.value
    return line


def page(lines: list[dict[str, Any]], options: argparse.Namespace) -> str:
    """The table in its words."""
    kinds = [f"{key} {epsilon:g}" for key in ("whole", "subspace") for epsilon in EPSILONS]
    head = ["arm", "batch", "steps", "training loss", "test accuracy in %", *kinds, "seeds"]
    rows = [head, ["---"] * len(head)]
    for arm in ARMS:
        mine = [line for line in lines if line["arm"] == arm]
        if mine:
            rows.append([
                arm,
                str(mine[0]["batch"]),
                str(mine[0]["steps"]),
                cell([line["loss"] for line in mine], ".3f"),
                cell([line["accuracy"] for line in mine], ".1f", 100.0),
                *(cell([line[kind] for line in mine], ".0f") for kind in kinds),
                str(len(mine)),
            ])  # fmt: skip
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    return (
        "# Sharpness of small- and large-batch minima on digits\n\n"
        "The recipes [keskar-2016](../recipes/keskar-2016.md): a small residual net, Adam without "
        "decay at a constant rate, a hundredth and a tenth of the data per step. Sharpness is "
        "`100 (max f - f) / (1 + f)` in a box around the minimum (Keskar et al. 2016), by ten "
        "iterations of L-BFGS-B from a random start, f the mean training loss over "
        f"{options.samples} samples in evaluation mode: in the whole space, and in a subspace of "
        f"{DIRECTIONS} random directions, for both box sizes of the paper. Mean over seeds with "
        f"its 95 % interval (Student's t), torch {torch.__version__.split('+')[0]}.\n\n"
        "```bash\n"
        f"python experiments/studies/sharpness_digits.py --seeds {options.seeds} "
        f"--samples {options.samples}\n```\n\n"
        f"{table}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--samples", type=int, default=300, help="training samples of the loss")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of lines and page")
    options = parser.parse_args()
    torch.set_num_threads(1)
    path = options.out / f"{NAME}.jsonl"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    lines = [json.loads(line) for line in text.splitlines()]
    lines = [line for line in lines if line["samples"] == options.samples]
    for seed in range(options.seeds):
        for arm in ARMS:
            if any((line["arm"], line["seed"]) == (arm, seed) for line in lines):
                continue
            line = {"arm": arm, "seed": seed, "samples": options.samples}
            lines.append(line | measured(arm, seed, options.samples))
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(lines[-1]) + "\n")
            print(lines[-1], flush=True)
    (options.out / f"{NAME}.md").write_text(page(lines, options), encoding="utf-8")


if __name__ == "__main__":
    main()
