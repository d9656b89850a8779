"""Base of every configuration: frozen, validated, and unions of variants told apart by `kind`."""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from typing import Annotated, Any, TypeVar, Union

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from adaptive_platform.errors import UserError

__all__ = ["Settings", "Variant", "import_variants", "union_of", "user_error", "variants_of"]


class Settings(BaseModel):
    """A frozen configuration. Unknown fields, wrong types and non-finite numbers are refused.

    The string under each field is its documentation; error messages show it.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


class Variant(Settings):
    """One of several choices. A concrete subclass gives `kind` a `Literal` default."""

    kind: str


V = TypeVar("V", bound=Variant)


def import_variants(package: str) -> None:
    """Import every module of a room and its sub-packages: a new variant is found by being a file.

    Args:
        package: Dotted name of the room, such as `adaptive_platform.controllers`.
    """
    module = importlib.import_module(package)
    for found in pkgutil.walk_packages(module.__path__, prefix=f"{package}."):
        importlib.import_module(found.name)


def variants_of(base: type[V]) -> dict[str, type[V]]:
    """Concrete subclasses of `base` by their `kind`, in alphabetical order.

    Raises:
        TypeError: Two classes claim one `kind`.
    """
    found: dict[str, type[V]] = {}
    for cls in _subclasses(base):
        default = cls.model_fields["kind"].default
        if inspect.isabstract(cls) or not isinstance(default, str):
            continue
        if default in found:
            raise TypeError(f"{cls.__qualname__} and {found[default].__qualname__}: kind={default}")
        found[default] = cls
    return dict(sorted(found.items()))


def union_of(base: type[V], admits: Callable[[type[V]], bool] = lambda _: True) -> Any:
    """The type of a field that holds one variant of `base`, chosen by `kind`.

    Only the modules imported so far count, so a room calls `import_variants` first.

    Args:
        base: Base of the variants.
        admits: Says of a variant whether the field may hold it.
    """
    classes = tuple(cls for cls in variants_of(base).values() if admits(cls))
    if len(classes) == 1:
        return classes[0]
    return Annotated[Union[classes], Field(discriminator="kind")]  # noqa: UP007


def user_error(error: ValidationError, model: type[BaseModel], source: str = "") -> UserError:
    """Turn pydantic's report into sentences with field, value, what is allowed and the fix.

    Args:
        error: What validation raised.
        model: The model that was validated; its field names serve the suggestions.
        source: Where the input came from, put before the sentences.
    """
    lines = [_sentence(detail, model) for detail in error.errors()]
    head = f"{source}: " if source else ""
    return UserError("\n".join(f"{head}{line}" for line in lines))


def _subclasses(base: type[V]) -> Iterator[type[V]]:
    for cls in base.__subclasses__():
        yield cls
        yield from _subclasses(cls)


def _sentence(detail: ErrorDetails, model: type[BaseModel]) -> str:
    owner, path = _resolve(model, detail["loc"])
    field = ".".join(path) or "recipe"
    kind, context, value = detail["type"], detail.get("ctx", {}), detail["input"]
    if kind == "extra_forbidden":
        allowed = sorted(owner.model_fields) if owner else []
        close = difflib.get_close_matches(path[-1], allowed, n=1)
        hint = f" Did you mean `{'.'.join([*path[:-1], close[0]])}`?" if close else ""
        return f"{field}: there is no such field.{hint} Allowed here: {', '.join(allowed)}."
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        given = context.get("tag", "(missing)")
        expected = str(context.get("expected_tags", "")).replace("'", "")
        if not expected:
            return f"{field}.kind is missing: say which kind you want."
        close = difflib.get_close_matches(str(given), expected.split(", "), n=1)
        hint = f" Did you mean `{close[0]}`?" if close else ""
        return f"{field}.kind = {given}: must be one of {expected}.{hint}"
    if kind == "missing":
        return f"{field} is missing: give it a value.{_help(owner, path)}"
    reason = detail["msg"]
    if kind == "value_error":
        reason = str(context.get("error", reason))
    reason = (reason[0].lower() + reason[1:]).rstrip(".")
    return f"{field} = {_show(value)}: {reason}.{_help(owner, path)}"


def _show(value: object) -> str:
    text = repr(value) if isinstance(value, (str, type(None))) else str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _help(owner: type[BaseModel] | None, path: list[str]) -> str:
    info = owner.model_fields.get(path[-1]) if owner and path else None
    return f" ({info.description.strip()})" if info is not None and info.description else ""


def _resolve(
    model: type[BaseModel], loc: tuple[int | str, ...]
) -> tuple[type[BaseModel] | None, list[str]]:
    """The model that owns the last name of `loc`, and `loc` without pydantic's union tags."""
    owner: type[BaseModel] | None = model
    current: type[BaseModel] | None = model
    path: list[str] = []
    for part in loc:
        name = str(part)
        if current is not None and name in current.model_fields:
            owner = current
            path.append(name)
            candidates = _models_in(current.model_fields[name].annotation)
            current = candidates[0] if len(candidates) == 1 else None
            pending = candidates
        elif path and current is None:
            tagged = [
                c for c in pending if getattr(c.model_fields.get("kind"), "default", 0) == name
            ]
            if tagged:
                current = owner = tagged[0]
        elif current is not None:
            owner = current
            path.append(name)
    return owner, path


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return [annotation]
    return [m for arg in getattr(annotation, "__args__", ()) for m in _models_in(arg)]
