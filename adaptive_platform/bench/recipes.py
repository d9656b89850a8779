"""The published systems side by side: the small forms of all recipes on the same samples."""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adaptive_platform.bench.processes import run_group
from adaptive_platform.bench.recipe_cards import write_cards
from adaptive_platform.bench.recipe_pages import write_pages
from adaptive_platform.bench.rows import Row
from adaptive_platform.collectives import Membership
from adaptive_platform.errors import UserError
from adaptive_platform.recipe import load_recipe, published_recipes
from adaptive_platform.report.records import EvalRecord, StepRecord
from adaptive_platform.training.observer import SilentObserver
from adaptive_platform.training.run import TrainingRun

__all__ = ["REFERENCE", "Arm", "Job", "arms", "arms_of_cards", "jobs_for", "recipes", "train_all"]

REFERENCE = "small batch"
_DEFAULT_FOLDER = "runs/bench-recipes"
_LONGEST_SECONDS = 7 * 24 * 3600.0
_IMAGES = {"limit": 10_000, "eval_limit": 2_000}
_KEPT_APART = {"name", "description", "seed", "data"}
"""Fields that do not make another arm: data sets have files of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One line of the table."""

    name: str
    recipe: str
    """A shipped recipe in its small form."""
    changes: tuple[str, ...] = ()
    """What it changes in that, as on the command line."""


_FURTHER = (
    Arm(
        name=REFERENCE,
        recipe="goyal-2017",
        changes=("batch.global_batch=32", "schedule.warmup=0 epochs"),
    ),
    Arm(name="lin-2018, every step", recipe="lin-2018", changes=("sync.kind=every_step",)),
    Arm(name="codreanu-2017, last", recipe="codreanu-2017", changes=("ensemble=false",)),
    Arm(
        name="jin-2016-gossip, push", recipe="jin-2016-gossip", changes=("sync.direction=push",)
    ),
    Arm(
        name="sun-2019, dense",
        recipe="sun-2019",
        changes=("reducer.sparse=null", "optimizer.momentum=0.9"),
    ),
    Arm(name="yao-2018, ABS", recipe="yao-2018", changes=("batch={kind: abs, global_batch: 32, "
        "duration_epochs: 2, max_ratio: 16}",)),
    Arm(name="jiang-2023, LARS alone", recipe="jiang-2023", changes=("vr=null",)),
    Arm(
        name="jiang-2023, SGD",
        recipe="jiang-2023",
        changes=("optimizer.kind=sgd", "optimizer.lr=1", "optimizer.weight_decay=0.0005"),
    ),
    Arm(
        name="jiang-2023, LAMB",
        recipe="jiang-2023",
        changes=("optimizer.kind=lamb", "optimizer.lr=0.02"),
    ),
)  # fmt: skip
_QUICK = (REFERENCE, "goyal-2017", "johnson-2020")


def arms() -> dict[str, Arm]:
    """Every shipped small form, and further arms that some claim is held against, by name."""
    published = (Arm(name=name, recipe=name) for name in published_recipes())
    return {arm.name: arm for arm in (_FURTHER[0], *published, *_FURTHER[1:])}


def arms_of_cards() -> dict[str, list[str]]:
    """Names of the arms that each card shows; a `-small` variant has no card of its own."""
    found: dict[str, list[str]] = {}
    for arm in arms().values():
        if arm.name != REFERENCE:
            found.setdefault(arm.recipe.removesuffix("-small"), []).append(arm.name)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run."""

    arm: str
    seed: int
    recipe: dict[str, Any]
    """Its content, without defaults."""

    @property
    def settings(self) -> str:
        """Digest of what the run is made of: results of a changed recipe are not taken for its."""
        content = {k: v for k, v in self.recipe.items() if k not in _KEPT_APART}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]

    @property
    def key(self) -> tuple[str, int, str]:
        """What tells its line in the file from others."""
        return self.arm, self.seed, self.settings


def jobs_for(
    names: Iterable[str], seeds: int, *, images: str = "", changes: Sequence[str] = ()
) -> list[Job]:
    """All runs, seed by seed, so that a study that is stopped has seen every arm alike.

    Args:
        names: Of arms.
        seeds: Runs per arm.
        images: Folder with `train.parquet` and `test.parquet`; empty for the recipes' own data.
        changes: To every recipe, as on the command line.

    Raises:
        UserError: The folder lacks one of the files.
    """
    found, known = [], arms()
    data = [] if not images else [_image_data(Path(images))]
    for seed in range(seeds):
        for name in names:
            arm = known[name]
            # Nothing but steps and evaluations: what is sent is then sent by the steps.
            quiet = ["checkpoint={every: 0 epochs, keep_best: false}"]
            recipe = load_recipe(
                arm.recipe, [*arm.changes, *data, *quiet, f"seed={seed}", *changes]
            )
            content = recipe.model_dump(mode="json", exclude_unset=True)
            found.append(Job(arm=name, seed=seed, recipe=content))
    return found


def recipes(*, quick: bool, out: str = "", images: str = "", cards: str = "") -> list[Row]:
    """Train every arm for the length that all small forms share, and write table and curves.

    Two local processes of one thread train one arm after the other. Each finished run is a line of
    `recipes-<data>.jsonl`: a study that is stopped goes on where it was. Table (`.md`) and curves
    (`.html`, and `.png` where matplotlib is there) are written anew from all lines.

    Args:
        quick: One seed of three arms, in a folder that is not kept unless `out` names one.
        out: Folder of the results.
        images: Folder with `train.parquet` and `test.parquet`, of which the first 10,000 and 2,000
            images are used, in place of the recipes' own digits.
        cards: Folder of the recipes' cards, which then show what was measured.

    Raises:
        UserError: A card or a file of images is missing.
    """
    jobs = jobs_for(_QUICK if quick else arms(), 1 if quick else 3, images=images)
    with ExitStack() as stack:
        if quick and not out:
            out = stack.enter_context(tempfile.TemporaryDirectory())
        folder = Path(out or _DEFAULT_FOLDER)
        folder.mkdir(parents=True, exist_ok=True)
        data = Path(images).resolve().name if images else "digits"
        record = folder / f"recipes-{data}.jsonl"
        _cut_off_unfinished(record)
        have = _lines(record, jobs)
        missing = [job for job in jobs if job.key not in have]
        if missing:
            (workers,) = {job.recipe["workers"] for job in missing}
            run_group(workers, train_all, missing, str(record), timeout_seconds=_LONGEST_SECONDS)
            have = _lines(record, jobs)
        lines = [have[job.key] for job in jobs]
        write_pages(
            lines, folder / f"recipes-{data}", reference=REFERENCE, panels=published_recipes()
        )
        if cards:
            write_cards(lines, Path(cards), arms_of=arms_of_cards(), reference=REFERENCE)
        if not quick:
            print(f"{record.with_suffix('.md')}, and curves beside it", file=sys.stderr)
    return _rows(lines)


def train_all(membership: Membership, jobs: Sequence[Job], record: str) -> None:
    """Train one job after the other as one of the workers; the first worker writes the lines."""
    for generation, job in enumerate(jobs, start=1):
        started = time.perf_counter()
        alike = Membership(
            membership.store,
            membership.rank,
            membership.world_size,
            generation,
            membership.node_of_rank,
        )
        result = _train(alike, job)
        if membership.rank == 0:
            line = {"arm": job.arm, "seed": job.seed, "settings": job.settings, **result}
            with Path(record).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            print(
                f"{generation} of {len(jobs)}: {job.arm}, seed {job.seed}: "
                f"{result['accuracy']:.1%} after {result['steps']} steps, "
                f"{time.perf_counter() - started:.0f} s",
                file=sys.stderr,
                flush=True,
            )


class _Keeper(SilentObserver):
    """Keeps steps, evaluations and what was sent for the steps alone."""

    def __init__(self) -> None:
        self._run: TrainingRun | None = None
        self.steps: list[StepRecord] = []
        self.evaluations: list[EvalRecord] = []
        self.bytes_sent = 0
        self._mark = 0

    def watch(self, run: TrainingRun) -> None:
        """Begin to count what is sent, now that the workers have met."""
        self._run = run
        self._since()

    def step(self, record: StepRecord, fraction_done: float) -> None:
        """See `Observer.step`."""
        self.steps.append(record)
        self.bytes_sent += self._since()

    def evaluation(self, record: EvalRecord) -> None:
        """See `Observer.evaluation`."""
        self.evaluations.append(record)
        self._since()

    def _since(self) -> int:
        assert self._run is not None
        before, self._mark = self._mark, self._run.bytes_sent
        return self._mark - before


def _train(membership: Membership, job: Job) -> dict[str, Any]:
    recipe = load_recipe(job.recipe)
    source = recipe.data.open()
    model = recipe.model.build(len(source.classes), recipe.seed)
    keeper, loss = _Keeper(), recipe.loss.build()
    with TrainingRun(
        recipe,
        model,
        source,
        recipe.data,
        membership,
        observer=keeper,
        makes_adversaries=True,
    ) as run:
        keeper.watch(run)
        for batch in run:
            with run.memory_guard():
                trained_on = run.with_adversaries(batch, loss)
                with run.autocast():
                    outputs = run.model(trained_on.inputs)
                    losses = loss(outputs, trained_on.targets)
                run.backward(losses, outputs)
    return _result(keeper) if membership.rank == 0 else {}


def _result(keeper: _Keeper) -> dict[str, Any]:
    counted = [record for record in keeper.steps if not record.skipped]
    seconds = sum(record.step_seconds for record in keeper.steps)
    return {
        "accuracy": keeper.evaluations[-1].accuracy,
        "loss": keeper.evaluations[-1].loss,
        "steps": counted[-1].step,
        "samples": counted[-1].samples_seen,
        "seconds": seconds,
        "bytes_per_step": keeper.bytes_sent / len(keeper.steps),
        "exposed_share": sum(record.reduce_seconds for record in keeper.steps) / seconds,
        "skipped": len(keeper.steps) - len(counted),
        "curve": [[e.step, e.samples_seen, e.accuracy] for e in keeper.evaluations],
    }


def _cut_off_unfinished(record: Path) -> None:
    """Drop a last line that was being written when the study was killed."""
    text = record.read_text(encoding="utf-8") if record.exists() else ""
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        record.write_text(whole, encoding="utf-8")


def _lines(record: Path, jobs: Iterable[Job]) -> dict[tuple[str, int, str], dict[str, Any]]:
    """The lines of these jobs; those of other arms, or of recipes as they once were, are left."""
    wanted = {job.key for job in jobs}
    text = record.read_text(encoding="utf-8") if record.exists() else ""
    lines = [json.loads(line) for line in text.splitlines()]
    keyed = {(line["arm"], line["seed"], line["settings"]): line for line in lines}
    return {key: line for key, line in keyed.items() if key in wanted}


def _image_data(folder: Path) -> str:
    files = [folder / "train.parquet", folder / "test.parquet"]
    for file in files:
        if not file.is_file():
            raise UserError(
                f"--images = {folder}: there is no {file.name}. Name a folder with train.parquet "
                "and test.parquet, columns `image` and `label`."
            )
    content = {"kind": "parquet", "train": str(files[0]), "eval": str(files[1]), **_IMAGES}
    return f"data={json.dumps(content)}"


_UNITS = {
    "accuracy": "share",
    "steps": "steps",
    "samples": "samples",
    "seconds": "s",
    "bytes_per_step": "B/step",
    "exposed_share": "share",
}


def _rows(lines: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Means over seeds, against those of the small batch."""
    by_arm: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        by_arm.setdefault(line["arm"], []).append(line)

    def mean(arm: str, figure: str) -> float:
        values = [float(line[figure]) for line in by_arm[arm]]
        return sum(values) / len(values)

    rows = []
    for arm, mine in by_arm.items():
        for figure, unit in _UNITS.items():
            value = mean(arm, figure)
            baseline = mean(REFERENCE, figure) if REFERENCE in by_arm else None
            rows.append(
                Row(
                    bench="recipes",
                    case=f"{arm}: {figure.replace('_', ' ')}",
                    value=value,
                    unit=unit,
                    baseline=baseline,
                    ratio=value / baseline if baseline else None,
                    repeats=len(mine),
                )
            )
    return rows
