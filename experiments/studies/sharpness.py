"""How sharp the minima are that finished runs ended in (Keskar et al. 2016, arXiv 1609.04836).

    python experiments/studies/sharpness.py RUN_DIR OTHER_RUN_DIR
    python experiments/studies/sharpness.py RUN_DIR --directions 100 --samples 1000

Without `--directions` the whole space is searched; with it a random subspace of so many Gaussian
directions, another one for each repetition. Prints `100 (max f - f) / (1 + f)` for both box sizes
of the paper, mean and standard deviation over the repetitions, one line a run.
"""

from __future__ import annotations

import argparse
import statistics
import sys

import numpy as np

from adaptive_platform.errors import UserError
from adaptive_platform.statistics.sharpness import Vector, sharpness
from adaptive_platform.training.landscape import Landscape, landscape_of

EPSILONS = (1e-3, 5e-4)
MOST_BYTES = 4 * 2**30


def directions(landscape: Landscape, count: int, seed: int) -> Vector | None:
    """Gaussian columns that span a random subspace; None for the whole space."""
    size = len(landscape.parameters())
    if count == 0:
        return None
    if 8 * size * count > MOST_BYTES:
        raise UserError(
            f"--directions = {count}: with {size:,} parameters they take "
            f"{8 * size * count / 2**30:.0f} GiB; at most {MOST_BYTES // (8 * size)} fit into "
            f"{MOST_BYTES // 2**30} GiB."
        )
    return np.random.default_rng(seed).standard_normal((size, count))


def measured(landscape: Landscape, options: argparse.Namespace) -> dict[float, list[float]]:
    """Sharpness of each repetition, by box size."""
    at = landscape.parameters()
    found: dict[float, list[float]] = {epsilon: [] for epsilon in EPSILONS}
    for seed in range(options.repeats):
        columns = directions(landscape, options.directions, seed)
        for epsilon, values in found.items():
            values.append(
                sharpness(landscape, at, epsilon=epsilon, directions=columns, seed=seed).value
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN_DIR")
    parser.add_argument("--directions", type=int, default=0, help="0: the whole space")
    parser.add_argument("--samples", type=int, help="training samples; nothing: all")
    parser.add_argument("--step", type=int, help="checkpoint of this step; nothing: the newest")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    try:
        for run in options.runs:
            landscape = landscape_of(run, step=options.step, limit=options.samples)
            found = measured(landscape, options)
            figures = "; ".join(
                f"epsilon {epsilon:g}: {statistics.fmean(values):.4g} "
                f"± {statistics.pstdev(values):.2g}"
                for epsilon, values in found.items()
            )
            print(f"{run}: {figures} ({landscape.num_samples} samples, {options.repeats} runs)")
    except UserError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
