"""Words such as `batch.global_batch=100`, read and put into a recipe's content."""

from __future__ import annotations

from typing import Any

import yaml

from adaptive_platform.errors import UserError
from adaptive_platform.recipe.model import Recipe

__all__ = ["apply_overrides", "copied", "fields_of", "parse_overrides"]

_TEXTS = (["out"], ["resume"], ["address"], ["description"])
"""Fields whose override is taken as it is typed."""

_KEPT = {
    "batch": frozenset(["global_batch", "min_batch", "max_batch"]),
    "reducer": frozenset(["bucket_mib", "timeout_seconds", "wire_dtype"]),
}
"""Fields whose meaning does not depend on the kind of the part they belong to."""


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
    result: dict[str, Any] = copied(content)
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
            known = fields_of(names[0], value) & _KEPT.get(names[0], frozenset())
            result[names[0]] = {k: v for k, v in node.items() if k in known} | {"kind": value}
        else:
            node[names[-1]] = value
    if lengths:
        result["stop"].pop("steps" if lengths[-1] == "epochs" else "epochs", None)
    return result


def fields_of(room: str, kind: object) -> set[str]:
    """Field names of the variant `kind` of a recipe field; all of them when it is unknown."""
    info = Recipe.model_fields.get(room)
    choices = getattr(info.annotation, "__args__", (info.annotation,)) if info else ()
    for choice in choices:
        fields = getattr(choice, "model_fields", {})
        if "kind" in fields and fields["kind"].default == kind:
            return set(fields)
    return set()


def copied(node: Any) -> Any:
    """A copy of nested mappings that shares nothing but their leaves."""
    if isinstance(node, dict):
        return {key: copied(value) for key, value in node.items()}
    return node
