"""Optimizer state by parameter name, so that a checkpoint fits any worker count and grouping."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from adaptive_platform.errors import CheckpointError

__all__ = ["NamedState", "load_named_state", "named_state"]

NamedState = dict[str, dict[str, Any]]
"""Parameter name -> state key -> tensor or number; `torch.load(weights_only=True)` reads it."""

_TORCH_STATE_KEYS: dict[type[Optimizer], set[str]] = {
    torch.optim.SGD: {"momentum_buffer"},
    torch.optim.AdamW: {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"},
}


def named_state(
    optimizer: Optimizer, named_parameters: Iterable[tuple[str, nn.Parameter]]
) -> NamedState:
    """The state of every parameter that has some, under the parameter's name.

    Tensors are the optimizer's own, not copies: copy or write them before the next step.

    Args:
        optimizer: Any torch optimizer that keeps its state per parameter.
        named_parameters: The model's, without wrapper prefixes. A shared parameter goes under
            its first name.

    Raises:
        CheckpointError: The optimizer holds a parameter that is not among the named ones.
    """
    found: NamedState = {}
    for name, param in _names(optimizer, named_parameters).items():
        state = optimizer.state.get(param, {})
        if state:
            found[name] = {
                key: value.detach() if isinstance(value, Tensor) else value
                for key, value in state.items()
            }
    return found


def load_named_state(
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    saved: Mapping[str, Mapping[str, Any]],
) -> None:
    """Replace the optimizer's state by what `named_state` gave; the next step is the same bits.

    Everything is checked before anything is changed. A parameter without saved state starts
    afresh. Tensors shaped like their parameter take its device and memory layout and keep their
    own type; learning rate and other options of the groups stay as configured.

    Raises:
        CheckpointError: `saved` names a parameter this optimizer does not train, has another
            shape, or comes from another kind of optimizer.
    """
    params = _names(optimizer, named_parameters)
    foreign = sorted(set(saved) - set(params))
    if foreign:
        raise CheckpointError(
            f"checkpoint: it holds optimizer state for {_listed(foreign)}, which this run does not "
            "train. Resume with the model and the frozen parameters it was saved with."
        )
    for name, values in saved.items():
        _check(optimizer, name, params[name], values)
    for name, param in params.items():
        optimizer.state.pop(param, None)
        if name in saved:
            group = next(g for g in optimizer.param_groups if any(param is p for p in g["params"]))
            optimizer.state[param] = {
                key: _placed(key, value, param, group) for key, value in saved[name].items()
            }


def _names(
    optimizer: Optimizer, named_parameters: Iterable[tuple[str, nn.Parameter]]
) -> dict[str, nn.Parameter]:
    names: dict[int, str] = {}
    for name, param in named_parameters:
        names.setdefault(id(param), name)
    held = [param for group in optimizer.param_groups for param in group["params"]]
    nameless = [tuple(param.shape) for param in held if id(param) not in names]
    if nameless:
        raise CheckpointError(
            f"checkpoint: the optimizer holds parameters of shape {_listed(nameless)} that are not "
            "in the model. Build the optimizer from the parameters of the model that is trained."
        )
    return {names[id(param)]: param for param in held}


def _check(optimizer: Optimizer, name: str, param: nn.Parameter, values: Mapping[str, Any]) -> None:
    known = set(getattr(optimizer, "state_keys", ())) or _TORCH_STATE_KEYS.get(type(optimizer))
    if known is not None and not set(values) <= known:
        raise CheckpointError(
            f"checkpoint: optimizer state of {name} has {_listed(sorted(values))}, but "
            f"{type(optimizer).__name__} keeps {_listed(sorted(known))}. Resume with the kind of "
            "optimizer it was saved with."
        )
    for key, value in values.items():
        if isinstance(value, Tensor) and value.ndim and value.shape != param.shape:
            raise CheckpointError(
                f"checkpoint: {key} of {name} has shape {tuple(value.shape)}, the parameter "
                f"{tuple(param.shape)}. Resume with the model it was saved with."
            )


def _placed(key: str, value: Any, param: nn.Parameter, group: dict[str, Any]) -> Any:
    if not isinstance(value, Tensor):
        return value
    if key == "step":  # torch counts on the host, unless the whole step runs on the device
        on_device = group.get("fused") or group.get("capturable")
        return value.detach().to(param.device if on_device else "cpu", copy=True)
    if value.shape == param.shape:
        return torch.empty_like(param, dtype=value.dtype, requires_grad=False).copy_(value)
    return value.detach().to(param.device, copy=True)


def _listed(items: Iterable[object]) -> str:
    texts = [str(item) for item in items]
    return ", ".join(texts[:5]) + (f" and {len(texts) - 5} more" if len(texts) > 5 else "")
