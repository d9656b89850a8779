"""What each batch controller brings on real images: accuracy, steps and samples, with intervals.

    python experiments/studies/controllers.py
    python experiments/studies/controllers.py --images CIFAR10_DIR --epochs 12 --target 0.6

A small network on handwritten digits (8x8 pixels), or with `--images` on the first 10,000 training
and 2,000 test images of CIFAR-10; one process, the same number of samples for every arm, several
seeds. Each finished run is a line of `controllers-<data>.jsonl`, so a study that is stopped goes on
where it was. `controllers-<data>.md` and, where matplotlib is installed, `controllers-<data>.png`
are written anew from all lines after every run.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed import HashStore
from torch.nn import functional as F

from adaptive_platform.collectives import Membership
from adaptive_platform.data import DataConfig, DataSource, PythonConfig, wrap_dataset
from adaptive_platform.data.digits import DigitsConfig
from adaptive_platform.recipe import load_recipe
from adaptive_platform.report.records import EvalRecord, StepRecord
from adaptive_platform.training.observer import SilentObserver
from adaptive_platform.training.run import TrainingRun

HERE = Path(__file__).parent
SMALL, LARGE = 32, 512
ADASCALE = {"kind": "adascale", "base_batch": SMALL, "clock": "samples"}
LINEAR = {"kind": "linear", "base_batch": SMALL}
NO_RULE = {"kind": "none"}
MEASURED = {"global_batch": SMALL, "min_batch": SMALL, "max_batch": LARGE}


def arms(epochs: int) -> dict[str, dict[str, object]]:
    """Name of each arm and what it changes in the recipe."""

    def at(share: float) -> str:
        return f"{share * epochs:g} epochs"

    stages = [{"at": at(1 / 3), "batch": 4 * SMALL}, {"at": at(2 / 3), "batch": LARGE}]
    smith = {"kind": "smith", "global_batch": SMALL, "factor": 4.0, "max_batch": LARGE,
             "decays": [at(0.5), at(0.75)]}  # fmt: skip
    curvature = {"kind": "abs", "global_batch": SMALL, "max_ratio": LARGE // SMALL,
                 "duration_epochs": max(epochs // 4, 1)}  # fmt: skip
    return {
        f"fixed {SMALL}": {"batch": {"kind": "fixed", "global_batch": SMALL}, "lr_rule": NO_RULE},
        f"fixed {LARGE}, linear": {
            "batch": {"kind": "fixed", "global_batch": LARGE},
            "lr_rule": LINEAR,
            "schedule": {"kind": "cosine", "warmup": at(0.1)},
        },
        f"fixed {LARGE}, adascale": {
            "batch": {"kind": "fixed", "global_batch": LARGE},
            "lr_rule": ADASCALE,
        },
        "noise_scale, adascale": {
            "batch": {"kind": "noise_scale"} | MEASURED,
            "lr_rule": ADASCALE,
        },
        "gsnr, adascale": {"batch": {"kind": "gsnr"} | MEASURED, "lr_rule": ADASCALE},
        "goodput, adascale": {"batch": {"kind": "goodput"} | MEASURED, "lr_rule": ADASCALE},
        "schedule, adascale": {
            "batch": {"kind": "schedule", "global_batch": SMALL, "stages": stages},
            "lr_rule": ADASCALE,
        },
        "abs, linear": {"batch": curvature, "lr_rule": LINEAR},
        "absa, linear": {"batch": curvature | {"kind": "absa"}, "lr_rule": LINEAR},
        "smith": {"batch": smith, "lr_rule": NO_RULE, "schedule": {"kind": "constant"}},
    }


class Images(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Images in memory, normalized, not augmented."""

    def __init__(self, file: Path, count: int) -> None:
        import pyarrow.parquet as pq
        from PIL import Image
        from torchvision.transforms.functional import pil_to_tensor

        table = pq.read_table(file).slice(0, count)
        image, label = table.column_names[:2]
        pixels = []
        for entry in table[image].to_pylist():
            data = entry["bytes"] if isinstance(entry, dict) else entry
            pixels.append(pil_to_tensor(Image.open(io.BytesIO(data)).convert("RGB")))
        self.inputs = (torch.stack(pixels).float() / 255.0 - 0.47) / 0.25
        self.labels = torch.tensor(table[label].to_pylist())

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.labels[index]


def network(seed: int, pixels: int) -> nn.Module:
    """Convolutions with batch norm, each halving the image, down to 4 or 2 pixels."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    before = 3
    for width in (16, 32, 64) if pixels > 8 else (16, 32):
        layers += [nn.Conv2d(before, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
                   nn.MaxPool2d(2)]  # fmt: skip
        before = width
        pixels //= 2
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(before * pixels**2, 10))


class Keeper(SilentObserver):
    """Keeps what the table needs."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []
        self.evals: list[EvalRecord] = []

    def step(self, record: StepRecord, fraction_done: float) -> None:
        """See `Observer.step`."""
        self.steps.append(record)

    def evaluation(self, record: EvalRecord) -> None:
        """See `Observer.evaluation`."""
        self.evals.append(record)


def losses(outputs: Tensor, targets: Tensor) -> Tensor:
    """One per sample."""
    return F.cross_entropy(outputs, targets, reduction="none")


def train(
    arm: dict[str, object], seed: int, epochs: int, source: DataSource, config: DataConfig
) -> Keeper:
    """One run of one arm."""
    pixels = source.train.image_size or 32
    recipe = load_recipe(
        {
            "seed": seed,
            "stop": {"epochs": epochs},
            "data": config.model_dump(),
            "optimizer": {"kind": "sgd", "lr": 0.02, "momentum": 0.9, "weight_decay": 5e-4},
            "schedule": {"kind": "cosine"},
            "reducer": {"kind": "ring"},
            "report": {"evaluate_every": "0.5 epochs"},
        }
        | arm
    )
    keeper = Keeper()
    membership = Membership(HashStore(), 0, 1)
    run = TrainingRun(
        recipe,
        network(seed, pixels),
        source,
        config,
        membership,
        observer=keeper,
        makes_adversaries=True,
    )
    try:
        for batch in run:
            trained_on = run.with_adversaries(batch, losses)
            outputs = run.model(trained_on.inputs)
            run.backward(losses(outputs, trained_on.targets), outputs)
    finally:
        run.close()
    return keeper


def result_of(keeper: Keeper, target: float) -> dict[str, object]:
    reached = [e for e in keeper.evals if (e.accuracy or 0.0) >= target]
    return {
        "accuracy": keeper.evals[-1].accuracy,
        "steps": keeper.steps[-1].step,
        "samples": keeper.steps[-1].samples_seen,
        "mean_batch": keeper.steps[-1].samples_seen / keeper.steps[-1].step,
        "largest_batch": max(record.global_batch for record in keeper.steps),
        "steps_to_target": reached[0].step if reached else None,
        "samples_to_target": reached[0].samples_seen if reached else None,
        "seconds": sum(record.step_seconds for record in keeper.steps),
        "curve": [[e.step, e.samples_seen, e.accuracy] for e in keeper.evals],
    }


# Two-sided 95 % quantiles of Student's t, by degrees of freedom.
_T95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}


def cell(values: list[float | None], form: str, scale: float = 1.0) -> str:
    """Mean and 95 % interval over seeds; a dash where a seed has no value."""
    found = [scale * value for value in values if value is not None]
    if len(found) < len(values) or not found:
        return f"- ({len(found)} of {len(values)})"
    mean = format(statistics.mean(found), form)
    if len(found) == 1:
        return mean
    half = _T95.get(len(found) - 1, 1.96) * statistics.stdev(found) / math.sqrt(len(found))
    return f"{mean} ± {format(half, form)}"


def table(lines: list[dict[str, object]], options: argparse.Namespace) -> str:
    head = ["arm", "accuracy in %", "steps", "samples/step", "largest batch",
            f"steps to {options.target:.0%}", f"samples to {options.target:.0%}",
            "seconds", "seeds"]  # fmt: skip
    rows = [head, ["---"] * len(head)]
    for name in arms(options.epochs):
        mine = [line for line in lines if line["arm"] == name]
        if not mine:
            continue

        def column(key: str, mine: list[dict[str, object]] = mine) -> list[float | None]:
            return [line[key] for line in mine]  # type: ignore[misc]

        rows.append([
            name,
            cell(column("accuracy"), ".1f", 100.0),
            cell(column("steps"), ".0f"),
            cell(column("mean_batch"), ".0f"),
            cell(column("largest_batch"), ".0f"),
            cell(column("steps_to_target"), ".0f"),
            cell(column("samples_to_target"), ".0f"),
            cell(column("seconds"), ".0f"),
            str(len(mine)),
        ])  # fmt: skip
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def write_page(lines: list[dict[str, object]], options: argparse.Namespace) -> None:
    images = f" --images ../shared/data/cifar10 --train {options.train}" if options.images else ""
    command = (
        f"python experiments/studies/controllers.py{images} --epochs {options.epochs} "
        f"--seeds {options.seeds} --target {options.target:g}"
    )
    data = (
        f"the first {options.train} images of CIFAR-10" if options.images else "handwritten digits"
    )
    path = options.out / f"controllers-{name_of(options)}.md"
    picture = ""
    if any("curve" in line for line in lines):
        picture = (
            f"\n![Held-out accuracy over optimizer steps and samples]({path.stem}.png)\n\n"
            "*Dashed: fixed batches. The dotted line is the target.*\n"
        )
    path.write_text(
        f"# Batch controllers on {data}\n\n"
        f"{options.epochs} epochs, a small convolutional network, SGD with momentum, "
        "one worker that sees noise between the halves of each batch. Every arm trains on the "
        "same number of samples and starts from the settings that suit the batch of "
        f"{SMALL}. Mean over seeds with its 95 % interval (Student's t); a dash where not every "
        f"seed reached the target. Torch {torch.__version__}, one thread of a CPU that others used "
        "as well, so seconds are a hint only.\n\n"
        f"    {command}\n\n{table(lines, options)}\n{picture}",
        encoding="utf-8",
    )


def draw(lines: list[dict[str, object]], options: argparse.Namespace) -> None:
    """Mean held-out accuracy over optimizer steps and over samples, one line an arm."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(12.0, 4.6), dpi=150, layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for at, name in enumerate(arms(options.epochs)):
        curves = [line["curve"] for line in lines if line["arm"] == name and "curve" in line]
        if not curves:
            continue
        shortest = min(map(len, curves))  # type: ignore[arg-type]
        points = torch.tensor([curve[:shortest] for curve in curves]).mean(0)  # type: ignore[index]
        style = {"color": f"C{at % 10}", "ls": "--" if name.startswith("fixed") else "-", "lw": 1.4}
        panels[0].plot(points[:, 0], 100.0 * points[:, 2], label=name, **style)
        panels[1].plot(points[:, 1], 100.0 * points[:, 2], **style)
    panels[0].set_xscale("log")
    panels[0].legend(frameon=False, fontsize=8)
    panels[0].set_ylabel("held-out accuracy in %, mean over seeds")
    for panel, label in zip(panels, ("optimizer steps", "samples"), strict=True):
        panel.set_xlabel(label)
        panel.axhline(100.0 * options.target, color="#999999", lw=0.8, ls=":")
        panel.grid(color="#ececec")
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(options.out / f"controllers-{name_of(options)}.png")


def name_of(options: argparse.Namespace) -> str:
    return "cifar10" if options.images else "digits"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=Path, help="folder of train.parquet and test.parquet")
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--target", type=float, default=0.97)
    parser.add_argument("--train", type=int, default=10_000)
    parser.add_argument("--test", type=int, default=2_000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    record = options.out / f"controllers-{name_of(options)}.jsonl"
    text = record.read_text(encoding="utf-8") if record.exists() else ""
    lines = [json.loads(line) for line in text.splitlines()]
    done = {(line["arm"], line["seed"], line["epochs"]) for line in lines}
    config: DataConfig = DigitsConfig(image_size=8)
    if options.images:
        config = PythonConfig()
        source = wrap_dataset(
            Images(options.images / "train.parquet", options.train),
            Images(options.images / "test.parquet", options.test),
            tuple(str(digit) for digit in range(10)),
        )
    else:
        source = config.open()
    for seed in range(options.seeds):
        for name, arm in arms(options.epochs).items():
            if (name, seed, options.epochs) in done:
                continue
            started = time.time()
            result = result_of(train(arm, seed, options.epochs, source, config), options.target)
            lines.append({"arm": name, "seed": seed, "epochs": options.epochs} | result)
            with record.open("a", encoding="utf-8") as file:
                file.write(json.dumps(lines[-1]) + "\n")
            write_page(lines, options)
            draw(lines, options)
            shown = {key: value for key, value in result.items() if key != "curve"}
            print(f"{name}, seed {seed}: {shown} in {time.time() - started:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
