"""The Python doors: train from a recipe, bring a model and data, or keep your own loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from adaptive_platform.cluster.directory import recipe_of_run
from adaptive_platform.data import DataConfig, PythonConfig
from adaptive_platform.errors import RunFailedError, UserError
from adaptive_platform.recipe import Recipe, load_recipe, shipped_recipes
from adaptive_platform.report.records import RunResult

if TYPE_CHECKING:
    from torch import nn

    from adaptive_platform.gradients.loss import SampleLoss

__all__ = ["AdaptiveTrainer", "resolve_recipe", "train", "with_own_data"]


def resolve_recipe(
    recipe: Recipe | str | Path | dict[str, Any] | None, overrides: list[str]
) -> Recipe:
    """The recipe that is meant: given, shipped, from a file, or that of the run to resume.

    `resume=DIR` among the overrides takes the recipe from that run; other overrides then change
    single fields of it, such as `workers=3`.

    Raises:
        UserError: It can't be read, is not valid, or is another recipe than the run's.
    """
    resume = [word.partition("=")[2] for word in overrides if word.startswith("resume=")]
    if resume and not isinstance(recipe, Recipe):
        content = recipe_of_run(resume[-1])
        if recipe is not None:
            _refuse_another(recipe, content, resume[-1])
        content.pop("out", None)
        return load_recipe(content, overrides)
    if isinstance(recipe, Recipe):
        return load_recipe(recipe.model_dump(mode="json"), overrides) if overrides else recipe
    return load_recipe(recipe if recipe is not None else "quickstart", overrides)


def _refuse_another(recipe: str | Path | dict[str, Any], run: dict[str, Any], where: str) -> None:
    """A resumed run goes on with its own recipe; one that says something else must not be ignored.

    A shipped recipe is named by way of reminder, so only its name is compared.
    """
    named = load_recipe(recipe)
    if named.name != run.get("name"):
        raise UserError(
            f"resume = {where}: it holds a run of `{run.get('name')}`, not of `{named.name}`. "
            "Leave the recipe away, or name the right directory."
        )
    if str(recipe) in shipped_recipes():
        return
    asked, had = named.model_dump(mode="json"), Recipe.model_validate(run).model_dump(mode="json")
    differing = [f for f in asked if f not in ("out", "resume") and asked[f] != had[f]]
    if differing:
        raise UserError(
            f"resume = {where}: the run was made with another {', '.join(differing)} than {recipe} "
            "says. Leave the file away and change single fields with field=value words."
        )


def with_own_data(recipe: Recipe) -> Recipe:
    """The recipe for data from Python: settings of the old kind stay where they were changed."""
    if recipe.data.kind == "python":
        return recipe
    defaults = {f: info.default for f, info in type(recipe.data).model_fields.items()}
    kept = {
        f: getattr(recipe.data, f)
        for f in DataConfig.model_fields
        if f != "kind" and getattr(recipe.data, f) != defaults[f]
    }
    return recipe.model_copy(update={"data": PythonConfig(**kept)})


def train(
    recipe: Recipe | str | Path | dict[str, Any] | None = None,
    *overrides: str,
    console: Console | None = None,
) -> RunResult:
    """Train from a recipe alone.

        import adaptive_platform as ap
        result = ap.train("quickstart", "workers=1", "stop.epochs=2")

    Args:
        recipe: A shipped name, a YAML path, a dictionary or a `Recipe`; `quickstart` where None.
        *overrides: `field=value` words.
        console: Where progress is shown; None for silence.

    Returns:
        How it ended: `status` is `done`, or `interrupted` where a signal stopped it.

    Raises:
        UserError: The recipe or its data can't be used.
        RunFailedError: It failed; the message names the cause.
    """
    from adaptive_platform.cluster.launch import launch

    return _raise_failure(launch(resolve_recipe(recipe, list(overrides)), console=console))


class AdaptiveTrainer:
    """Trains a model of yours on data of yours, with everything else from a recipe.

        trainer = ap.AdaptiveTrainer("quickstart", model=make_net, train_data=train, eval_data=test)
        result = trainer.fit()

    Args:
        recipe: As for `train`; its `model` and `data` fields give way to the arguments.
        model: A module, or a function that makes one on each worker.
        train_data: Any map-style data set of (input, label); None for the recipe's.
        eval_data: Held-out data of the same form; None for none.
        classes: Class names; known to the checkpoint, which is refused for others.
        loss: `(outputs, targets) -> losses (b,)`; the recipe's cross entropy where None.
        overrides: `field=value` words.
    """

    def __init__(
        self,
        recipe: Recipe | str | Path | dict[str, Any] | None = None,
        *overrides: str,
        model: nn.Module | Callable[[], nn.Module] | None = None,
        train_data: Any = None,
        eval_data: Any = None,
        classes: tuple[str, ...] = (),
        loss: SampleLoss | None = None,
    ) -> None:
        if eval_data is not None and train_data is None:
            raise UserError("eval_data: give train_data as well, or neither.")
        if train_data is not None and model is None:
            raise UserError("model: give one that fits train_data.")
        self.recipe = resolve_recipe(recipe, list(overrides))
        if train_data is not None:
            self.recipe = with_own_data(self.recipe)
        self._brought = {
            "model": model,
            "train_data": train_data,
            "eval_data": eval_data,
            "classes": tuple(classes),
            "loss": loss,
        }

    def fit(self, console: Console | None = None) -> RunResult:
        """Train to the end.

        Raises:
            UserError: The recipe, model or data can't be used.
            RunFailedError: Training failed; the message names the cause.
        """
        from adaptive_platform.cluster.launch import launch

        return _raise_failure(launch(self.recipe, console=console, **self._brought))


def _raise_failure(result: RunResult) -> RunResult:
    if result.exit_code == 2:
        raise UserError(result.message)
    if result.status == "failed":
        raise RunFailedError(result.message)
    return result
