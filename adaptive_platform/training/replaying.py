"""What another controller would have done with a recorded run: decisions, steps, samples, time."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import ValidationError

from adaptive_platform.controllers import ControllerConfig, Limits
from adaptive_platform.controllers.goodput import split_of
from adaptive_platform.controllers.lr_rules import LrRuleConfig
from adaptive_platform.controllers.replay import Recorded, Replay, replay
from adaptive_platform.errors import UserError
from adaptive_platform.recipe import Recipe, load_recipe, parse_overrides
from adaptive_platform.report.plots import Line, Plot
from adaptive_platform.report.run_data import RunData, read_run
from adaptive_platform.report.series import full_steps
from adaptive_platform.settings import user_error, variants_of
from adaptive_platform.statistics.throughput import StepTiming, ThroughputEstimator
from adaptive_platform.summary import GradientSummary, ThroughputModel

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Course", "RunReplay", "replay_run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """One way through the training, as a line of the table."""

    name: str
    steps: int
    samples: int
    seconds: float | None
    """Time of all steps; None where nothing was timed."""
    final_batch: int
    changes: int
    """Decisions that changed the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReplay:
    """A controller's course next to the run's own."""

    kind: str
    replayed: Replay
    throughput: ThroughputModel | None
    courses: tuple[Course, ...]
    """The run as recorded, the run by the throughput model, and the replay by the same model."""
    learned: float
    """Scale-invariant steps at which both end."""
    notes: tuple[str, ...]
    """What the numbers rest on, and what is missing."""
    plots: tuple[Plot, ...]
    """Batch and time of both over what was learned."""

    def lines(self) -> list[str]:
        """The decisions that changed the batch, one line each, then the notes."""
        told = []
        batch = self.replayed.batches[0]
        for progress, decision in self.replayed.decisions:
            if decision.changed:
                told.append(
                    f"step {progress.step}, epoch {progress.position:.2f}: batch {batch} -> "
                    f"{decision.global_batch} ({decision.reason})"
                )
            batch = decision.global_batch
        held = len(self.replayed.decisions) - len(told)
        told.append(f"{len(told)} change(s); {held} time(s) it looked and held")
        return told + list(self.notes)


def replay_run(
    run_dir: str | os.PathLike[str], controller: str, overrides: Sequence[str] = ()
) -> RunReplay:
    """Feed a run's recorded statistics through another controller.

    Args:
        run_dir: A run directory with `recipe.yaml` and at least one committed step.
        controller: Kind of the controller to try. It takes over the fields of the run's own that
            it knows too, such as `global_batch` and `max_batch`.
        overrides: `field=value` words for its other fields.

    Raises:
        UserError: No such controller or field, or the run's records don't suffice; says which.
    """
    run = read_run(run_dir)
    recipe = load_recipe(run.recipe)
    steps = run.steps[~run.steps["skipped"].astype(bool)]
    if not len(steps):
        raise UserError(f"{run.path}: it has no committed step, so there is nothing to replay.")
    config = _config(recipe, controller, overrides)
    notes = _missing(config, steps, run)
    limits = Limits(
        dataset_size=_dataset_size(run, steps),
        world_size=int(steps["world_size"].iloc[-1]),
        largest_microbatch=recipe.microbatch,
    )
    base = recipe.lr_rule.base_batch or recipe.batch.global_batch
    estimator = _timings(steps)
    throughput = estimator.fit()
    rule = recipe.lr_rule.chosen(for_betas=recipe.optimizer.keeps_squares)
    learned = float(steps["scale_invariant_step"].iloc[-1])
    replayed = replay(
        config,
        _recorded(steps, rule),
        learned=learned,
        base_batch=base,
        limits=limits,
        throughput=throughput,
        advance=rule.advance,
    )
    if throughput is None:
        notes.append("no step has a time, so none is predicted")
    else:
        splits = len(estimator.timings())
        note = f"throughput fitted to {splits} split(s), mean error {throughput.fit_error:.1%}"
        if splits == 1:
            note += "; one split can't tell fixed from growing cost, so times are rough"
        notes.append(note)
    return RunReplay(
        kind=controller,
        replayed=replayed,
        throughput=throughput,
        courses=_courses(run, steps, controller, replayed, throughput),
        learned=learned,
        notes=tuple(notes),
        plots=_plots(steps, controller, replayed, throughput, base, limits),
    )


def _plots(
    steps: pd.DataFrame,
    kind: str,
    replayed: Replay,
    throughput: ThroughputModel | None,
    base: int,
    limits: Limits,
) -> tuple[Plot, ...]:
    """What the run and the replay did, over scale-invariant steps."""
    learned = [0.0, *steps["scale_invariant_step"].tolist()]
    batches = steps["global_batch"].tolist()
    theirs = list(replayed.learned)
    own_at, own_batch = _full(learned, batches, limits.dataset_size)
    other_at, other_batch = _full(theirs, replayed.batches, limits.dataset_size)
    own, other = "run, recorded", f"{kind}, replayed"
    unit = f"progress in steps of the base batch ({base})"

    def plot(title: str, unit_y: str, lines: list[Line]) -> Plot:
        return Plot(title=title, x=unit, y=unit_y, lines=lines)

    plots = [
        plot("Global batch", "samples per step", [
            Line(name=own, x=own_at, y=own_batch, dashed=True, staircase=True),
            Line(name=other, x=other_at, y=other_batch, staircase=True),
        ]),
        plot("Optimizer steps", "steps", [
            Line(name=own, x=learned, y=list(range(len(learned))), dashed=True),
            Line(name=other, x=theirs, y=list(range(len(theirs)))),
        ]),
        plot("Samples", "samples", [
            Line(name=own, x=learned, y=[0.0, *np.cumsum(batches).tolist()], dashed=True),
            Line(name=other, x=theirs, y=[0.0, *np.cumsum(replayed.batches[:-1]).tolist()]),
        ]),
    ]  # fmt: skip
    if throughput is not None:
        seconds = [
            throughput.step_seconds(limits.world_size, limits.num_nodes, *split_of(b, limits))
            for b in replayed.batches[:-1]
        ]
        spent = [0.0, *np.cumsum(steps["step_seconds"]).tolist()]
        plots.append(
            plot("Time", "seconds", [
                Line(name=own, x=learned, y=spent, dashed=True),
                Line(name=other, x=theirs, y=[0.0, *np.cumsum(seconds).tolist()]),
            ])
        )  # fmt: skip
    return tuple(plots)


def _full(
    at: Sequence[float], batches: Sequence[int], size: int
) -> tuple[list[float], list[float]]:
    """Positions and batches without the left-over ends of epochs."""
    import pandas as pd

    begun = np.concatenate([[0], np.cumsum(batches)[:-1]])
    frame = pd.DataFrame(
        {"at": at[: len(batches)], "global_batch": batches, "epoch": begun // size}
    )
    full = full_steps(frame)
    return full["at"].tolist(), full["global_batch"].tolist()


def _config(recipe: Recipe, kind: str, overrides: Sequence[str]) -> ControllerConfig:
    kinds = variants_of(ControllerConfig)  # type: ignore[type-abstract]
    if kind not in kinds:
        raise UserError(f"--controller = {kind}: must be one of {', '.join(kinds)}.")
    known = set(kinds[kind].model_fields)
    content: dict[str, Any] = {
        name: value for name, value in recipe.batch.model_dump(mode="json").items() if name in known
    }
    for names, value in parse_overrides(list(overrides)):
        node = content
        for name in names[:-1]:
            node = node.setdefault(name, {})
            if not isinstance(node, dict):
                raise UserError(f"--set {'.'.join(names)}: {name} has no fields of its own.")
        node[names[-1]] = value
    try:
        return kinds[kind].model_validate(content | {"kind": kind})
    except ValidationError as error:
        raise user_error(error, kinds[kind], f"--controller {kind}") from None


def _missing(config: ControllerConfig, steps: pd.DataFrame, run: RunData) -> list[str]:
    """Notes about needs that the records serve only in part; refuses where one isn't at all."""
    columns = {"noise": "noise_trace", "layers": "gsnr", "hessian": "hessian_top_eigenvalue"}
    for need in sorted(config.needs & set(columns)):
        column = columns[need]
        if column not in steps or bool(steps[column].isna().all()):
            fix = {
                "noise": "Only runs with two micro-batches in a step, recorded with columns "
                "`noise_trace` and `signal_sqnorm`, can be replayed with it",
                "layers": "Record a run without statistics.layers=false",
                "hessian": "Record a run with batch.kind=abs",
            }[need]
            raise UserError(
                f"--controller = {config.kind}: it needs {need}, but {run.path} has no value in "
                f"`{column}`. {fix}."
            )
    notes = [
        "noise is taken to depend on how much was learned, counted in scale-invariant steps; "
        "that a larger batch learns as much per gain is AdaScale's model, not a measurement"
    ]
    if "biased" in steps and bool(steps["biased"].fillna(False).astype(bool).any()):
        notes.append("a part of the noise was estimated with bias, from one micro-batch per step")
    return notes


def _recorded(steps: pd.DataFrame, rule: LrRuleConfig) -> list[Recorded]:
    """What was known after each step, and how much was learned before it."""
    after = steps["scale_invariant_step"].tolist()
    # The sum that the run had, and not a difference, whose last digit would move the noise by one.
    first = after[0] - rule.advance(float(steps["gain"].iloc[0]))
    recorded = []
    observations = 0
    for before, noise, signal, gsnr, eigenvalue in zip(
        [first, *after[:-1]],
        *(
            _numbers(steps, name)
            for name in ("noise_trace", "signal_sqnorm", "gsnr", "hessian_top_eigenvalue")
        ),
        strict=True,
    ):
        observations += noise is not None
        summary = GradientSummary(
            noise_trace=noise,
            signal_sqnorm=signal,
            observations=observations,
            gsnr=gsnr,
            hessian_top_eigenvalue=eigenvalue,
        )
        recorded.append(Recorded(scale_invariant_steps=before, summary=summary))
    return recorded


def _numbers(steps: pd.DataFrame, name: str) -> list[float | None]:
    if name not in steps:
        return [None] * len(steps)
    values = [float("nan") if v is None else float(v) for v in steps[name].tolist()]
    return [None if math.isnan(v) else v for v in values]


def _timings(steps: pd.DataFrame) -> ThroughputEstimator:
    """All steps but the first, which pays for start-up."""
    estimator = ThroughputEstimator()
    names = ["world_size", "microbatch", "accumulation", "step_seconds"]
    for world, microbatch, accumulation, seconds in steps[names].iloc[1:].itertuples(index=False):
        if microbatch > 0:
            estimator.update(
                StepTiming(
                    world_size=int(world),
                    num_nodes=1,
                    microbatch=int(microbatch),
                    accumulation=int(accumulation),
                    step_seconds=float(seconds),
                )
            )
    return estimator


def _dataset_size(run: RunData, steps: pd.DataFrame) -> int:
    result = run.result or {}
    if result.get("epochs"):
        return max(round(result["samples"] / result["epochs"]), 1)
    # Without a result: an epoch that is over used each sample once; else what is known so far.
    in_epochs = steps.groupby("epoch")["global_batch"].sum()
    return int(in_epochs.max())


def _courses(
    run: RunData,
    steps: pd.DataFrame,
    kind: str,
    replayed: Replay,
    throughput: ThroughputModel | None,
) -> tuple[Course, ...]:
    own = {
        "steps": len(steps),
        "samples": int(steps["global_batch"].sum()),
        # Without a result the last step but one, since the last of an epoch may be short.
        "final_batch": (run.result or {}).get("final_batch")
        or int(steps["global_batch"].iloc[-min(len(steps), 2)]),
        "changes": int((run.decisions["old_batch"] != run.decisions["new_batch"]).sum()),
    }
    courses = [Course(name="run, recorded", seconds=float(steps["step_seconds"].sum()), **own)]
    if throughput is not None:
        seconds = sum(
            throughput.step_seconds(int(w), 1, float(m), max(int(a), 1))
            for w, m, a in steps[["world_size", "microbatch", "accumulation"]].itertuples(
                index=False
            )
        )
        courses.append(Course(name="run, by the model", seconds=seconds, **own))
    # Not the last step's size, which is what an epoch leaves over.
    final = replayed.decisions[-1][1].global_batch if replayed.decisions else replayed.batches[0]
    courses.append(
        Course(
            name=f"{kind}, replayed",
            steps=replayed.progress.step,
            samples=replayed.progress.samples,
            seconds=replayed.seconds,
            final_batch=final,
            changes=sum(decision.changed for _, decision in replayed.decisions),
        )
    )
    return tuple(courses)
