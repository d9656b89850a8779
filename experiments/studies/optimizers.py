"""Steps to a target accuracy by optimizer and batch size, each with the same small tuning budget.

    python experiments/studies/optimizers.py --images ../shared/data/cifar10

A small convolutional network on the first 10,000 training and 2,000 test images of CIFAR-10, halved
to 16x16 pixels, in memory and not augmented; one process of one thread. Every optimizer gets three
learning rates per batch size, tried on a seed of their own; the one that reaches the target in the
fewest steps (or else ends with the best accuracy) is run on the seeds that count. All arms share
epochs, warm-up, decay, momentum and weight decay, and back-propagate eight micro-batches a step, so
that batch norm and VRGD see the same. Each finished run is a line of `optimizers-cifar10.jsonl`, so
a study that is stopped goes on where it was; `optimizers-cifar10.md` is written anew every time.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from controllers import Images, Keeper, cell, network
from torch.distributed import HashStore
from torch.nn import functional as F

from adaptive_platform.collectives import Membership
from adaptive_platform.data import DataSource, PythonConfig, wrap_dataset
from adaptive_platform.recipe import load_recipe
from adaptive_platform.training.run import TrainingRun

HERE = Path(__file__).parent
NAME = "optimizers-cifar10"
BATCHES = (256, 1024, 4096)
DEVICES = 8
"""Micro-batches a step: VRGD compares them."""
TUNING_SEED = 1000
PIXELS = 16


@dataclass(frozen=True)
class Arm:
    """An optimizer and the learning rates it may choose from."""

    optimizer: dict[str, Any]
    rates: tuple[float, float, float]
    """At batch 256; they grow with the square root of the batch."""
    more: dict[str, Any] = field(default_factory=dict)
    """What else it changes in the recipe."""

    def rate(self, index: int, batch: int) -> float:
        """The learning rate for a batch, to three digits."""
        return float(f"{self.rates[index] * (batch / BATCHES[0]) ** 0.5:.3g}")


FIRST_ORDER = {"weight_decay": 5e-4}
ARMS = {
    "sgd": Arm({"kind": "sgd"} | FIRST_ORDER, (0.01, 0.03, 0.09)),
    "lars": Arm({"kind": "lars", "trust_coefficient": 0.01} | FIRST_ORDER, (0.3, 0.9, 2.7)),
    "lamb": Arm({"kind": "lamb"} | FIRST_ORDER, (0.002, 0.006, 0.018)),
    "sp_ngd": Arm({"kind": "sp_ngd", "momentum": 0.9, "momentum_rule": "constant",
                   "damping": 1e-3, "kl_clip": None, "rescale_weights": False} | FIRST_ORDER,
                  (0.001, 0.003, 0.01)),
    "vr-lars": Arm({"kind": "lars", "trust_coefficient": 0.01} | FIRST_ORDER, (0.3, 0.9, 2.7),
                   {"vr": {}}),
}  # fmt: skip


def train(
    arm: Arm, index: int, batch: int, seed: int, source: DataSource, options: argparse.Namespace
) -> dict[str, Any]:
    """One run to its end; what the table needs of it."""
    recipe = load_recipe(
        {
            "seed": seed,
            "stop": {"epochs": options.epochs},
            "data": {"kind": "python"},
            "batch": {"kind": "fixed", "global_batch": batch},
            "microbatch": batch // DEVICES,
            "lr_rule": {"kind": "none"},
            "optimizer": arm.optimizer | {"lr": arm.rate(index, batch)},
            "schedule": {"kind": "cosine", "warmup": f"{options.epochs / 6:g} epochs"},
            "statistics": {"every": 10**9},
            "reducer": {"kind": "ring"},
            "report": {"evaluate_every": "0.25 epochs"},
        }
        | arm.more
    )
    keeper = Keeper()
    membership = Membership(HashStore(), 0, 1)
    run = TrainingRun(
        recipe, network(seed, PIXELS), source, PythonConfig(), membership, observer=keeper
    )
    try:
        for part in run:
            outputs = run.model(part.inputs)
            run.backward(F.cross_entropy(outputs, part.targets, reduction="none"), outputs)
    finally:
        run.close()
    reached = [e.step for e in keeper.evals if (e.accuracy or 0.0) >= options.target]
    return {
        "lr": arm.rate(index, batch),
        "steps_to_target": reached[0] if reached else None,
        "accuracy": keeper.evals[-1].accuracy,
        "steps": keeper.steps[-1].step,
        "seconds": sum(record.step_seconds for record in keeper.steps),
    }


def images(file: Path, count: int) -> Images:
    """Images in memory, each pixel the mean of four."""
    found = Images(file, count)
    found.inputs = F.avg_pool2d(found.inputs, found.inputs.shape[-1] // PIXELS)
    return found


class Record:
    """Finished runs, one JSON line each."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._path = options.out / f"{NAME}.jsonl"
        text = self._path.read_text(encoding="utf-8") if self._path.exists() else ""
        lines = [json.loads(line) for line in text.splitlines()]
        self._setting = {key: getattr(options, key) for key in ("epochs", "train", "target")}
        self.lines = [line for line in lines if self._setting.items() <= line.items()]

    def find(self, name: str, batch: int, seed: int, index: int) -> dict[str, Any] | None:
        """The run, where it is there."""
        wanted = {"arm": name, "batch": batch, "seed": seed, "index": index}
        return next((line for line in self.lines if wanted.items() <= line.items()), None)

    def add(self, line: dict[str, Any]) -> None:
        """Append a run."""
        self.lines.append(line | self._setting)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(self.lines[-1]) + "\n")


def best_index(record: Record, name: str, batch: int) -> int | None:
    """Of the learning rates, once all were tried: fewest steps, then best accuracy."""
    tried = [record.find(name, batch, TUNING_SEED, index) for index in range(3)]
    if any(line is None for line in tried):
        return None

    def rank(index: int) -> tuple[float, float]:
        line = tried[index]
        assert line is not None
        steps, accuracy = line["steps_to_target"], line["accuracy"]
        return (steps if steps is not None else float("inf"), -accuracy)

    return min(range(3), key=rank)


def table(record: Record, options: argparse.Namespace) -> str:
    """Batches in the rows, optimizers below each other."""
    head = ["batch", "optimizer", "learning rate", f"steps to {options.target:.0%}",
            "accuracy at the end in %", "steps", "seconds/step"]  # fmt: skip
    rows = [head, ["---"] * len(head)]
    for batch in BATCHES:
        for name in ARMS:
            index = best_index(record, name, batch)
            if index is None:
                continue
            found = [record.find(name, batch, seed, index) for seed in range(options.seeds)]
            mine = [line for line in found if line is not None]
            if not mine:
                continue
            rows.append([
                f"{batch:,}",
                name,
                f"{mine[0]['lr']:g}",
                cell([line["steps_to_target"] for line in mine], ".0f"),
                cell([line["accuracy"] for line in mine], ".1f", 100.0),
                str(mine[0]["steps"]),
                cell([line["seconds"] / line["steps"] for line in mine], ".2f"),
            ])  # fmt: skip
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def write_page(record: Record, options: argparse.Namespace) -> None:
    command = (
        f"python experiments/studies/optimizers.py --images ../shared/data/cifar10 "
        f"--epochs {options.epochs} --seeds {options.seeds} --target {options.target:g} "
        f"--train {options.train}"
    )
    tried = "; ".join(
        f"{name} {', '.join(f'{rate:g}' for rate in arm.rates)}" for name, arm in ARMS.items()
    )
    (options.out / f"{NAME}.md").write_text(
        "# Optimizers and batch size on CIFAR-10\n\n"
        f"The first {options.train:,} training images at 16x16 pixels, a small convolutional "
        "network, "
        f"{options.epochs} epochs, momentum 0.9 (LAMB: betas 0.9 and 0.999), linear warm-up over a "
        "sixth of the run and cosine decay. Learning rates were chosen per optimizer and batch "
        "from three, on one seed that does not count; at batch 256 they were, growing with the "
        f"square root of the batch: {tried}. Mean over {options.seeds} further seeds with its "
        "95 % interval (Student's t); a dash says how many seeds reached the target, where not all "
        f"did. Torch {torch.__version__}, one thread of a CPU that others used as well, so seconds "
        "are a hint only.\n\n"
        f"    {command}\n\n{table(record, options)}\n",
        encoding="utf-8",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=Path, required=True, help="folder of the parquet files")
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--target", type=float, default=0.5)
    parser.add_argument("--train", type=int, default=10_000)
    parser.add_argument("--test", type=int, default=2_000)
    parser.add_argument("--only", nargs="*", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--batches", nargs="*", type=int, default=list(BATCHES), choices=BATCHES)
    options = parser.parse_args()
    torch.set_num_threads(1)
    record = Record(options)
    source = wrap_dataset(
        images(options.images / "train.parquet", options.train),
        images(options.images / "test.parquet", options.test),
        tuple(str(digit) for digit in range(10)),
    )

    def run(name: str, batch: int, seed: int, index: int) -> None:
        if record.find(name, batch, seed, index):
            return
        started = time.time()
        result = train(ARMS[name], index, batch, seed, source, options)
        record.add({"arm": name, "batch": batch, "seed": seed, "index": index} | result)
        write_page(record, options)
        print(f"{name}, batch {batch}, seed {seed}: {result} in {time.time() - started:.0f} s")
        sys.stdout.flush()

    for batch in options.batches:
        for name in options.only:
            for index in range(3):
                run(name, batch, TUNING_SEED, index)
    for seed in range(options.seeds):
        for batch in options.batches:
            for name in options.only:
                index = best_index(record, name, batch)
                assert index is not None  # all three were just tried
                run(name, batch, seed, index)
    write_page(record, options)


if __name__ == "__main__":
    main()
