"""Recipes by name, from a file or from a dictionary, with overrides; what ships."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from adaptive_platform.errors import UserError
from adaptive_platform.recipe.model import Recipe
from adaptive_platform.recipe.overrides import apply_overrides, copied, parse_overrides
from adaptive_platform.settings import user_error

__all__ = ["load_recipe", "published_recipes", "read_mapping", "shipped_recipes"]


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


def _recipe_folder() -> Path:
    """`recipes` inside an installed package, `experiments/recipes` beside a checked-out one."""
    package = Path(__file__).parents[1]
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
        return copied(content), source
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
