"""The words that name a recipe and change its fields."""

from __future__ import annotations

from typing import Annotated

import typer

from adaptive_platform.errors import UserError

__all__ = ["RecipeWords", "split_words"]

RecipeWords = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RECIPE] [FIELD=VALUE]...",
        help="A shipped recipe or a YAML file, then fields to change, such as workers=2.",
    ),
]


def split_words(words: list[str]) -> tuple[str | None, list[str]]:
    """Tell the recipe from the `field=value` words.

    Raises:
        UserError: A second word that is not an override.
    """
    if words and "=" not in words[0]:
        recipe, rest = words[0], words[1:]
    else:
        recipe, rest = None, words
    for word in rest:
        if "=" not in word:
            raise UserError(f"{word}: write overrides as field=value, such as workers=2.")
    return recipe, list(rest)
