"""A run's whole configuration: one frozen model made of each room's own config."""

from __future__ import annotations

from typing import Annotated

import yaml
from pydantic import Field, field_validator, model_validator

from adaptive_platform.checkpoints.store import CheckpointConfig
from adaptive_platform.collectives import AnyReducer, AutoConfig
from adaptive_platform.controllers import AnyController, AnyLrRule, AnyMomentumRule
from adaptive_platform.controllers.momentum_rules import KeepMomentumConfig
from adaptive_platform.data import AnyData
from adaptive_platform.data.mixing import ErasingConfig, MixupConfig
from adaptive_platform.gradients.loss import LossConfig
from adaptive_platform.gradients.precision import PrecisionConfig
from adaptive_platform.models import ModelConfig
from adaptive_platform.optimizers import AnyOptimizer, AnySchedule, WeightAveragingConfig
from adaptive_platform.progress import Duration, Unit
from adaptive_platform.recipe.clashes import clashes
from adaptive_platform.report.trackers import TrackerKind
from adaptive_platform.settings import Settings
from adaptive_platform.statistics import StatisticsConfig, VarianceReductionConfig
from adaptive_platform.sync import AnySync, EveryStepConfig

__all__ = ["MembershipConfig", "Recipe", "ReportConfig", "StopConfig"]


class StopConfig(Settings):
    """When a run is over. The length is required; the target may end it sooner."""

    epochs: Annotated[float, Field(gt=0)] | None = None
    """Passes over the training set; base-batch passes where `lr_rule.clock` is scale-invariant."""
    steps: Annotated[int, Field(ge=1)] | None = None
    """Committed optimizer steps; sum of their gains where `lr_rule.clock` is scale-invariant."""
    target: Annotated[float, Field(gt=0, le=1)] | None = None
    """Held-out accuracy at which the run ends early."""

    @model_validator(mode="after")
    def _one_length(self) -> StopConfig:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("give either epochs or steps, so that schedules have an end")
        return self

    @property
    def horizon(self) -> Duration:
        """The length of the run; schedules end there."""
        if self.steps is not None:
            return Duration(float(self.steps), Unit.STEPS)
        assert self.epochs is not None
        return Duration(self.epochs, Unit.EPOCHS)


class MembershipConfig(Settings):
    """What happens when workers are lost, come or leave while a run is under way."""

    live: bool = True
    """Those that are left go on at once, and replacements join them, where every worker has the
    whole state: not with second-order optimizers, copies that differ between syncs, or batch
    normalization over several workers. Off: every change starts all workers again."""
    min_efficiency: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Goodput per worker, over that of one worker alone, that the advised number of workers keeps.
    The advice comes at the end of each epoch, for runs with a range of `workers`."""
    follow_advice: bool = False
    """Let workers go, and look for others, until their number is the advised one. Needs `live`."""
    rebalance: bool = False
    """Let shares of a step's samples follow the measured speed of the workers. The global batch and
    the sums stay what they are. Not with group batch norm or with copies that differ."""


class ReportConfig(Settings):
    """What is recorded, and how often people hear of it."""

    evaluate_every: Duration = Duration(1.0, Unit.EPOCHS)
    """Training between two passes over the held-out set; the last one is always at the end."""
    record_sample_ids: bool = False
    """Also record which samples each worker used in each step."""
    flush_seconds: Annotated[float, Field(gt=0)] = 30.0
    """Records are written to the run directory at least this often."""
    html: bool = True
    """Write `report.html` at the end."""
    trackers: tuple[TrackerKind, ...] = ()
    """Where scalars go as well: `tensorboard` (files in the run directory), `mlflow`, `wandb`."""


class Recipe(Settings):
    """Everything that defines a run; `recipe.yaml` in its directory is enough to run it again."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "run"
    """Name in file names, reports and metrics."""
    description: str = ""
    """One line for people."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Fixes initial weights, data order and augmentation."""
    workers: Annotated[int, Field(ge=1)] | tuple[int, int] | None = None
    """Ray Train workers: a number, `[min, max]` for an elastic run, or nothing for every GPU of the
    cluster, or 2 where there is none."""
    out: str | None = None
    """Run directory: a path or a pyarrow URI. Nothing: `runs/<name>-<time>`."""
    resume: str | None = None
    """Run directory to continue."""
    address: str | None = None
    """Ray cluster to join, such as `auto`. Nothing: RAY_ADDRESS where set, else a local Ray."""
    stop: StopConfig
    """When the run is over."""
    model: ModelConfig = ModelConfig()
    """The network."""
    loss: LossConfig = LossConfig()
    """The loss."""
    data: AnyData
    """Where samples come from."""
    batch: AnyController
    """Who chooses the global batch, and where it starts."""
    lr_rule: AnyLrRule
    """What the learning rate does when the batch is not the base batch."""
    momentum_rule: AnyMomentumRule = KeepMomentumConfig()
    """What momentum, or the first beta, does when learning rate or batch move."""
    statistics: StatisticsConfig = StatisticsConfig()
    """How gradient noise is measured."""
    optimizer: AnyOptimizer
    """What turns gradients into steps; its `lr` belongs to the base batch."""
    schedule: AnySchedule
    """How the learning rate moves over the run."""
    momentum_schedule: AnySchedule | None = None
    """How the optimizer's momentum, or first beta, moves: a factor, in the same forms. Nothing: not
    at all."""
    weight_decay_schedule: AnySchedule | None = None
    """How the optimizer's weight decay moves, likewise; such as `kind: step` with `fractions:
    [0.8]` and `decay: 0.5` (arXiv 1711.04291), or the form of `schedule` itself (arXiv 1903.12650).
    Nothing: not at all."""
    mixup: MixupConfig | None = None
    """Train on mixtures of samples. Nothing: on the samples."""
    erasing: ErasingConfig | None = None
    """Blank random rectangles of training images. Nothing: none."""
    averaging: WeightAveragingConfig | None = None
    """Evaluations score an average of the weights. Nothing: the weights themselves."""
    ensemble: bool = False
    """With `schedule.kind = cyclic_tail`: keep the weights of every cycle's end; the evaluation
    there, and so the last one, scores the mean of all their probabilities (arXiv 1711.04291)."""
    vr: VarianceReductionConfig | None = None
    """Reduces each gradient element where micro-batches disagree (VRGD), ahead of any optimizer.
    Nothing: plain gradients."""
    microbatch: Annotated[int, Field(ge=1)] | None = None
    """Most samples of one forward and backward on one worker; more are accumulated. Nothing: a
    worker takes its share at once. Either way it is halved when memory runs out, on all workers,
    and stays so; the global batch does not change."""
    clip_norm: Annotated[float, Field(gt=0)] | None = None
    """Gradients with a larger norm are scaled down to it, before `vr` reduces them."""
    max_failures: Annotated[int, Field(ge=0)] = 3
    """Losses (of one worker, or of several at once) without a committed step in between that are
    borne before the run gives up; also how often all workers are started again from the newest
    checkpoint, where none could go on."""
    reducer: AnyReducer = AutoConfig()
    """How gradients are summed over workers."""
    sync: AnySync = EveryStepConfig()
    """How the workers' copies of the model are kept together."""
    membership: MembershipConfig = MembershipConfig()
    """What happens when workers are lost, come or leave."""
    precision: PrecisionConfig = PrecisionConfig()
    """Number formats."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When to save."""
    report: ReportConfig = ReportConfig()
    """What to record."""

    @field_validator("workers")
    @classmethod
    def _ordered(cls, value: int | tuple[int, int] | None) -> int | tuple[int, int] | None:
        if isinstance(value, tuple) and not 1 <= value[0] <= value[1]:
            raise ValueError("write [min, max] with 1 <= min <= max")
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> Recipe:
        for name in ("schedule", "momentum_schedule", "weight_decay_schedule"):
            schedule = getattr(self, name)
            if schedule is not None:
                schedule.check(self.stop.horizon)
        for problem in clashes(self):
            raise ValueError(problem)
        return self

    @property
    def is_live(self) -> bool:
        """Survivors go on without a restart: wanted, and every worker has all of the run's state.

        Second-order optimizers share out their factors, and a lost worker takes some with it; so
        it is with copies that differ and with gradients that wait to be sent. Layers that normalize
        over workers are made for their number.
        """
        shared_out = (
            self.optimizer.needs_model
            or self.sync.lets_copies_differ
            or self.reducer.sparse is not None
        )
        return self.membership.live and not shared_out and not self.model.normalization.together

    def to_yaml(self) -> str:
        """The recipe as YAML that `load_recipe` reads back to an equal recipe."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
