"""Which layers of a model are preconditioned, and which parameters keep the plain gradient."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["Coverage", "Layer", "cover"]

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass(frozen=True, slots=True)
class Layer:
    """Parameters that are preconditioned together, and the modules that use them."""

    name: str
    """Of the first module, in the model's order."""
    modules: tuple[nn.Module, ...]
    """More than one where modules share their parameters."""
    weight: nn.Parameter
    bias: nn.Parameter | None
    """None where there is none, or it is frozen."""

    @property
    def is_norm(self) -> bool:
        """True for batch normalization."""
        return isinstance(self.modules[0], _BatchNorm)


@dataclass(frozen=True, slots=True)
class Coverage:
    """The two sets, and why."""

    layers: tuple[Layer, ...]
    """Preconditioned, in the model's order."""
    plain: tuple[tuple[str, str], ...]
    """Name of each trainable parameter that keeps the plain gradient, and the reason."""

    def describe(self) -> str:
        """Both sets in words, for the start of a run."""
        names = ", ".join(layer.name or "(the model)" for layer in self.layers) or "none"
        lines = [f"natural gradient: {len(self.layers)} layers: {names}"]
        by_reason: dict[str, list[str]] = defaultdict(list)
        for name, reason in self.plain:
            by_reason[reason].append(name)
        lines += [f"plain gradient ({reason}): {', '.join(n)}" for reason, n in by_reason.items()]
        return "\n".join(lines if self.plain else [*lines, "plain gradient: none"])


def cover(model: nn.Module, *, norms: bool) -> Coverage:
    """Sort a model's trainable parameters.

    Covered are `nn.Linear`, `nn.Conv2d` with one group and, with `norms`, batch normalization with
    scale and shift. Exactly these classes: what derives from them may compute something else.
    Grouped and depthwise convolutions keep the plain gradient. Modules that share weight and bias
    are one layer that is used several times; a parameter that an uncovered module uses too keeps
    the plain gradient. A frozen bias is left out of its layer.

    Args:
        model: Any module.
        norms: Cover batch normalization.
    """
    users: dict[int, list[tuple[str, nn.Module]]] = defaultdict(list)
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            users[id(parameter)].append((name, module))
    layers: list[Layer] = []
    covered: set[int] = set()
    reasons: dict[int, str] = {}
    for name, module in model.named_modules():
        own = [p for p in module.parameters(recurse=False) if p.requires_grad]
        if not own or any(id(p) in covered for p in own):
            continue
        reason = _reason(module, norms) or _sharing(module, users)
        if reason:
            reasons.update({id(p): reason for p in own if id(p) not in reasons})
            continue
        weight, bias = module.weight, module.bias
        assert isinstance(weight, nn.Parameter)
        modules = tuple(user for _, user in users[id(weight)])
        trained = bias if isinstance(bias, nn.Parameter) and bias.requires_grad else None
        layers.append(Layer(name, modules, weight, trained))
        covered.update(id(p) for p in own)
    plain = [
        (name, reasons[id(p)])
        for name, p in model.named_parameters()
        if p.requires_grad and id(p) not in covered
    ]
    return Coverage(tuple(layers), tuple(plain))


def _reason(module: nn.Module, norms: bool) -> str:
    if type(module) in _NORMS:
        if not norms:
            return "norm layers are left out"
        both = all(p is not None and p.requires_grad for p in (module.weight, module.bias))
        return "" if both else "batch norm without both scale and shift"
    if type(module) is nn.Conv2d and module.groups > 1:
        return "grouped convolution"
    if type(module) not in (nn.Linear, nn.Conv2d):
        return f"{type(module).__name__} has no Kronecker factors"
    return "" if module.weight.requires_grad else "weight frozen"


def _sharing(module: nn.Module, users: dict[int, list[tuple[str, nn.Module]]]) -> str:
    assert isinstance(module.weight, nn.Parameter)
    for _, other in users[id(module.weight)]:
        same = type(other) is type(module) and other.weight is module.weight
        if not same or other.bias is not module.bias:
            return "shared with a layer of another kind"
    if isinstance(module.bias, nn.Parameter) and len(users[id(module.bias)]) != len(
        users[id(module.weight)]
    ):
        return "shared with a layer of another kind"
    return ""
