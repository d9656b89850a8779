"""The Python doors: train from a recipe, bring a model and data, or keep your own loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from adaptive_platform.cluster.directory import recipe_of_run
from adaptive_platform.data import PythonConfig
from adaptive_platform.errors import UserError
from adaptive_platform.recipe import Recipe, load_recipe
from adaptive_platform.report.records import RunResult

if TYPE_CHECKING:
    from torch import nn

    from adaptive_platform.gradients.loss import SampleLoss

__all__ = ["AdaptiveTrainer", "resolve_recipe", "train"]


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
            named = load_recipe(recipe).name
            if named != content.get("name"):
                raise UserError(
                    f"resume = {resume[-1]}: it holds a run of `{content.get('name')}`, not of "
                    f"`{named}`. Leave the recipe away, or name the right directory."
                )
        content.pop("out", None)
        return load_recipe(content, overrides)
    if isinstance(recipe, Recipe):
        return load_recipe(recipe.model_dump(mode="json"), overrides) if overrides else recipe
    return load_recipe(recipe if recipe is not None else "quickstart", overrides)


def train(
    recipe: Recipe | str | Path | dict[str, Any] | None = None,
    *overrides: str,
    console: Console | None = None,
    command_time: float | None = None,
) -> RunResult:
    """Train from a recipe alone.

        import adaptive_platform as ap
        result = ap.train("quickstart", "workers=1", "stop.epochs=2")

    Args:
        recipe: A shipped name, a YAML path, a dictionary or a `Recipe`; `quickstart` where None.
        *overrides: `field=value` words.
        console: Where progress is shown; None for silence.
        command_time: When the command began, in seconds since 1970.

    Raises:
        UserError: The recipe or its data can't be used.
    """
    from adaptive_platform.cluster.launch import launch

    resolved = resolve_recipe(recipe, list(overrides))
    return _raise_user_error(launch(resolved, console=console, command_time=command_time))


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
        if train_data is not None and self.recipe.data.kind != "python":
            self.recipe = self.recipe.model_copy(update={"data": PythonConfig()})
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
        """
        from adaptive_platform.cluster.launch import launch

        return _raise_user_error(launch(self.recipe, console=console, **self._brought))


def _raise_user_error(result: RunResult) -> RunResult:
    if result.exit_code == 2:
        raise UserError(result.message)
    return result
