"""A run's whole configuration: one frozen model made of each room's own config."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from adaptive_platform.checkpoints.store import CheckpointConfig
from adaptive_platform.collectives import AnyReducer, AutoConfig
from adaptive_platform.controllers import AnyController, AnyLrRule, AnyMomentumRule
from adaptive_platform.controllers.lr_rules import LegwConfig
from adaptive_platform.controllers.momentum_rules import KeepMomentumConfig
from adaptive_platform.data import AnyData
from adaptive_platform.data.mixing import ErasingConfig, MixupConfig
from adaptive_platform.errors import UserError
from adaptive_platform.gradients.loss import LossConfig
from adaptive_platform.gradients.precision import PrecisionConfig
from adaptive_platform.models import ModelConfig
from adaptive_platform.optimizers import AnyOptimizer, AnySchedule, WeightAveragingConfig
from adaptive_platform.optimizers.cyclic_tail import CyclicTailSchedule
from adaptive_platform.progress import Duration, Unit
from adaptive_platform.report.trackers import TrackerKind
from adaptive_platform.settings import Settings, user_error
from adaptive_platform.statistics import StatisticsConfig, VarianceReductionConfig
from adaptive_platform.sync import AnySync, EveryStepConfig
from adaptive_platform.sync.local_sgd import LocalSgdConfig

__all__ = [
    "MembershipConfig",
    "Recipe",
    "ReportConfig",
    "StopConfig",
    "apply_overrides",
    "load_recipe",
    "parse_overrides",
    "published_recipes",
    "read_mapping",
    "shipped_recipes",
]

_TEXTS = (["out"], ["resume"], ["address"], ["description"])
"""Fields whose override is taken as it is typed."""

_KEPT = {
    "batch": frozenset(["global_batch", "min_batch", "max_batch"]),
    "reducer": frozenset(["bucket_mib", "timeout_seconds", "wire_dtype"]),
}
"""Fields whose meaning does not depend on the kind of the part they belong to."""


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
    """Worker losses without a committed step in between after which the run gives up; also how
    often all workers are started again from the newest checkpoint, where none could go on."""
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
        for problem in _clashes(self):
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


def _clashes(recipe: Recipe) -> Iterator[str]:
    """Choices that are right alone and make no sense together: what, why, and the way out."""
    batch, rule, schedule = recipe.batch, recipe.lr_rule, recipe.schedule
    if batch.kind == "smith":
        if rule.kind != "none":
            yield (
                f"lr_rule.kind = {rule.kind}: with batch.kind = smith the batch grows in the place "
                "of a decay, and a rule that raises the learning rate with it would undo that; "
                "must be none."
            )
        if schedule.kind != "constant":
            yield (
                f"schedule.kind = {schedule.kind}: with batch.kind = smith the batch grows in the "
                "place of a decay, so a schedule that decays as well would decay twice; must be "
                "constant (a warm-up may stay)."
            )
    if recipe.optimizer.assumes_cross_entropy and recipe.loss.label_smoothing:
        yield (
            f"loss.label_smoothing = {recipe.loss.label_smoothing:g}: optimizer.kind = "
            f"{recipe.optimizer.kind} knows the curvature of plain cross entropy only; must be 0."
        )
    if recipe.vr is not None and recipe.optimizer.needs_model:
        yield (
            f"vr: optimizer.kind = {recipe.optimizer.kind} preconditions with its own curvature; "
            "gradients reduced by GSNR go with a first-order optimizer, such as lars."
        )
    yield from _sync_clashes(recipe)
    if recipe.statistics.preconditioned and not recipe.optimizer.keeps_squares:
        yield (
            f"statistics.preconditioned = true: optimizer.kind = {recipe.optimizer.kind} keeps no "
            "average of squared gradients to measure noise through; must be false or left away, or "
            "use adamw or lamb."
        )
    if isinstance(rule, LegwConfig):
        warmup = schedule.warmup
        matches = warmup.unit is not Unit.EPOCHS or warmup.value == rule.warmup_epochs
        if warmup.value == 0 or not matches:
            yield (
                f"lr_rule.warmup_epochs = {rule.warmup_epochs:g}: legw lengthens the schedule's "
                f"own linear warm-up, and schedule.warmup = {warmup}; make the two equal."
            )
    if recipe.momentum_schedule is not None and not recipe.optimizer.chosen_momentum:
        yield (
            f"momentum_schedule: optimizer.kind = {recipe.optimizer.kind} has no momentum here; "
            "set one above 0, or leave the schedule out."
        )
    if recipe.weight_decay_schedule is not None and not recipe.optimizer.weight_decay:
        yield (
            "weight_decay_schedule: optimizer.weight_decay = 0, of which any share is 0; set one "
            "above 0, or leave the schedule out."
        )
    if recipe.ensemble and not isinstance(schedule, CyclicTailSchedule):
        yield (
            f"ensemble = true: its members are the ends of a schedule's cycles, and schedule.kind "
            f"= {schedule.kind} has none; must be cyclic_tail, or set ensemble to false."
        )
    if recipe.ensemble and recipe.averaging is not None:
        yield "averaging: with ensemble = true the snapshots are scored; leave one of the two out."
    if recipe.sync.lets_copies_differ and (recipe.ensemble or recipe.averaging is not None):
        name = "ensemble" if recipe.ensemble else "averaging"
        yield (
            f"{name}: it follows weights that are alike on all workers, and sync.kind = "
            f"{recipe.sync.kind} lets them differ; must be every_step, or leave it out."
        )
    if recipe.reducer.sparse is not None:
        yield from _sparse_clashes(recipe)
    momentum = recipe.momentum_rule
    if momentum.kind != "keep":
        optimizer = recipe.optimizer
        if not optimizer.chosen_momentum:
            yield (
                f"momentum_rule.kind = {momentum.kind}: optimizer.kind = {optimizer.kind} has no "
                "momentum here; set one above 0, or momentum_rule.kind to keep."
            )
        if momentum.kind == "correct" and not optimizer.lr_in_buffer:
            yield (
                f"momentum_rule.kind = correct: the buffer of optimizer.kind = {optimizer.kind} "
                "holds no learning rates that could be corrected; must be keep or hold_noise, or "
                "use optimizer.kind = lars with form = paper."
            )


def _sync_clashes(recipe: Recipe) -> Iterator[str]:
    sync = recipe.sync
    if not sync.lets_copies_differ:
        return
    why = f"sync.kind = {sync.kind}: workers step with the gradients of their own samples"
    if recipe.optimizer.needs_model:
        yield (
            f"{why}, but optimizer.kind = {recipe.optimizer.kind} shares its curvature between "
            "workers in every step; must be a first-order optimizer, or sync.kind every_step."
        )
    if recipe.vr is not None:
        yield (
            f"{why}, so vr has no variance over workers to reduce them by; must be left out, or "
            "sync.kind every_step."
        )
    starts_later = isinstance(sync, LocalSgdConfig) and sync.start.value > 0
    if recipe.batch.needs & {"noise", "layers"} and not starts_later:
        yield (
            f"{why}, so the noise that batch.kind = {recipe.batch.kind} reads is not measured; "
            "must be fixed or schedule, or sync.kind local_sgd with a later start."
        )


def _sparse_clashes(recipe: Recipe) -> Iterator[str]:
    """What does not go together with gradients that travel sparsely."""
    optimizer, batch, rule = recipe.optimizer, recipe.batch, recipe.lr_rule
    wire = recipe.reducer.wire_dtype
    if optimizer.kind not in ("sgd", "lars") or optimizer.chosen_momentum:
        yield (
            f"optimizer.kind = {optimizer.kind}: with reducer.sparse momentum is applied before "
            "anything travels; must be sgd or lars with momentum = 0, and reducer.sparse.momentum "
            "in its place."
        )
    if {"noise", "layers"} & batch.needs or rule.kind == "adascale":
        yield (
            f"reducer.sparse: batch.kind = {batch.kind} and lr_rule.kind = {rule.kind} need "
            "measured noise, which a sum with holes does not give; use batch.kind fixed or "
            "schedule, and lr_rule.kind none, linear, sqrt or legw."
        )
    for name, value in (("vr", recipe.vr), ("clip_norm", recipe.clip_norm), ("wire_dtype", wire)):
        if value is not None:
            yield f"{name}: does not go together with reducer.sparse; leave one of the two away."
    if recipe.sync.kind != "every_step":
        yield (
            f"sync.kind = {recipe.sync.kind}: reducer.sparse is for gradients that are summed in "
            "every step; must be every_step."
        )
    if recipe.precision.first_scale().value != 1.0:
        yield (
            "precision: what waits for later steps can't follow a loss scale that moves; with "
            "reducer.sparse train in float32 or bfloat16."
        )


def shipped_recipes() -> dict[str, str]:
    """Names of the recipes in the package with their one-line descriptions."""
    found = {}
    for path in sorted(_recipe_folder().glob("*.yaml")):
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        found[path.stem] = str(content.get("description", ""))
    return found


def published_recipes() -> dict[str, str]:
    """Names and descriptions of the small forms of published systems.

    Each has a second form, `<name>-imagenet`, with the published settings.
    """
    shipped = shipped_recipes()
    return {name: text for name, text in shipped.items() if f"{name}-imagenet" in shipped}


def load_recipe(source: str | Path | dict[str, Any], overrides: list[str] | None = None) -> Recipe:
    """Read a shipped recipe by name, a YAML file by path, or a dictionary.

    Args:
        source: `quickstart`, `path/to/recipe.yaml` or the recipe's content.
        overrides: Words such as `batch.global_batch=100`, applied in order.

    Raises:
        UserError: No such recipe, not YAML, or a field that is unknown, missing or out of range.
    """
    if isinstance(source, dict):
        content, origin = source, ""
    else:
        content, origin = _read_yaml(str(source))
    content = apply_overrides(content, parse_overrides(overrides or []))
    try:
        return Recipe.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        if not first["loc"] and first["type"] == "value_error":
            # About several fields together, which the message names itself.
            said = str(first["ctx"]["error"])
            raise UserError(f"{origin}: {said}" if origin else said) from None
        raise user_error(error, Recipe, origin) from None


def parse_overrides(words: list[str]) -> list[tuple[list[str], Any]]:
    """Turn `a.b=value` words into paths and values; the value is read as YAML.

    Raises:
        UserError: A word without `=`, an empty name, or a value that is not YAML.
    """
    parsed = []
    for word in words:
        path, equals, text = word.partition("=")
        names = path.split(".")
        if not equals or not all(names):
            raise UserError(f"{word}: write overrides as field=value, such as workers=2.")
        try:
            # Paths are text: `out=/tmp/run #1` or `out=2024` mean what they say.
            value = text if names in _TEXTS else yaml.safe_load(text)
        except yaml.YAMLError:
            raise UserError(f"{path} = {text}: not a YAML value; put quotes around text.") from None
        parsed.append((names, value))
    return parsed


def apply_overrides(
    content: dict[str, Any], overrides: list[tuple[list[str], Any]]
) -> dict[str, Any]:
    """A copy of `content` with the overrides put in.

    Where an override chooses another `kind`, the old kind's numbers are dropped with it, since a
    learning rate of SGD is none for AdamW; only the batch and its bounds, and how long workers
    wait for each other, mean the same for all kinds and stay. In the same way
    `stop.steps=100` takes the place of `stop.epochs`; the last one said wins.
    """
    lengths = [n[1] for n, _ in overrides if n in (["stop", "epochs"], ["stop", "steps"])]
    result: dict[str, Any] = _copy(content)
    for names, value in sorted(overrides, key=lambda item: item[0][-1] != "kind"):
        node = result
        for depth, name in enumerate(names[:-1]):
            child = node.get(name)
            if child is None:
                child = node[name] = {}
            if not isinstance(child, dict):
                where = ".".join(names[: depth + 1])
                raise UserError(f"{where} = {child}: it has no fields of its own to set.")
            node = child
        if names[-1] == "kind" and len(names) == 2 and node.get("kind") != value:
            known = _fields_of(names[0], value) & _KEPT.get(names[0], frozenset())
            result[names[0]] = {k: v for k, v in node.items() if k in known} | {"kind": value}
        else:
            node[names[-1]] = value
    if lengths:
        result["stop"].pop("steps" if lengths[-1] == "epochs" else "epochs", None)
    return result


def _fields_of(room: str, kind: object) -> set[str]:
    """Field names of the variant `kind` of a recipe field; all of them when it is unknown."""
    info = Recipe.model_fields.get(room)
    choices = getattr(info.annotation, "__args__", (info.annotation,)) if info else ()
    for choice in choices:
        fields = getattr(choice, "model_fields", {})
        if "kind" in fields and fields["kind"].default == kind:
            return set(fields)
    return set()


def _recipe_folder() -> Path:
    """`recipes` inside an installed package, `experiments/recipes` beside a checked-out one."""
    package = Path(__file__).parent
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parent / "experiments" / "recipes"


def _read_yaml(source: str) -> tuple[dict[str, Any], str]:
    path = Path(source)
    shipped = shipped_recipes()
    if source in shipped:
        text = (_recipe_folder() / f"{source}.yaml").read_text(encoding="utf-8")
    elif _is_file(path):
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{source}: can't be read as UTF-8 text ({error}).") from None
    else:
        close = difflib.get_close_matches(source, shipped, n=1)
        hint = f" Did you mean `{close[0]}`?" if close else ""
        raise UserError(
            f"recipe = {source}: there is no shipped recipe and no file of that name.{hint} "
            f"Shipped: {', '.join(n for n in shipped if not n.endswith('-imagenet'))}, and all of "
            "`adaptive-platform recipes`."
        )
    try:
        content = read_mapping(text, source)
        return _copy(content), source
    except RecursionError:
        raise UserError(f"{source}: it contains itself (a YAML alias in a cycle).") from None


def read_mapping(text: str | bytes, source: str) -> dict[str, Any]:
    """A YAML mapping; the safe loader never runs code.

    Raises:
        UserError: Not YAML, or not a mapping.
    """
    try:
        content = yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{source}: not valid YAML ({error}).".replace("\n", " ")) from None
    if not isinstance(content, dict):
        raise UserError(f"{source}: a recipe is a YAML mapping of fields to values.")
    return content


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # such as a name that is too long
        return False


def _copy(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _copy(value) for key, value in node.items()}
    return node
