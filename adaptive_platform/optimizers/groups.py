"""Which parameters decay and which are left alone, printed on request; the knobs of every group."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.optim import Optimizer

from adaptive_platform.errors import UserError

__all__ = [
    "Exclude",
    "FollowsProgress",
    "describe_groups",
    "parameter_groups",
    "set_lr",
    "set_momentum",
    "set_progress",
    "set_weight_decay",
]

Exclude = Literal["norm_and_bias", "none"]


@runtime_checkable
class FollowsProgress(Protocol):
    """An optimizer whose update depends on how far training is, besides the learning rate."""

    def set_progress(self, epochs: float) -> None:
        """Take the fractional epochs done before the next step; the same on every worker."""


def parameter_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    *,
    exclude: Exclude,
    weight_decay: float,
    excluded_lr_scale: float,
    **excluded_settings: Any,
) -> list[dict[str, Any]]:
    """Split trainable parameters into torch parameter groups named `decay` and `excluded`.

    With `norm_and_bias`, parameters of fewer than two dimensions are excluded: biases, and the
    scale and shift of normalization layers. They get no weight decay. A frozen parameter is left
    out; a shared one counts once, under its first name. An empty group is left out.

    Args:
        named_parameters: As `nn.Module.named_parameters()` gives them.
        exclude: The rule.
        weight_decay: Of the group `decay`.
        excluded_lr_scale: Multiplies the learning rate of the group `excluded`.
        excluded_settings: More options of the group `excluded`.

    Raises:
        UserError: Nothing is trainable.
    """
    decay: list[tuple[str, nn.Parameter]] = []
    excluded: list[tuple[str, nn.Parameter]] = []
    seen: set[int] = set()
    for name, parameter in named_parameters:
        if not parameter.requires_grad or id(parameter) in seen:
            continue
        seen.add(id(parameter))
        alone = exclude == "norm_and_bias" and parameter.ndim <= 1
        (excluded if alone else decay).append((name, parameter))
    groups: list[dict[str, Any]] = [
        {"params": decay, "name": "decay", "lr_scale": 1.0, "weight_decay": weight_decay},
        {
            "params": excluded,
            "name": "excluded",
            "lr_scale": excluded_lr_scale,
            "weight_decay": 0.0,
            **excluded_settings,
        },
    ]
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise UserError(
            "model: no parameter is trainable. Set requires_grad on those that should learn."
        )
    return groups


def describe_groups(optimizer: Optimizer) -> str:
    """The grouping in words: per group its size, decay, learning-rate factor, and every name."""
    lines = []
    for index, group in enumerate(optimizer.param_groups):
        parameters: list[Tensor] = group["params"]
        elements = sum(parameter.numel() for parameter in parameters)
        lines.append(
            f"group {group.get('name', index)}: {len(parameters)} tensors, {elements:,} elements, "
            f"weight decay {group.get('weight_decay', 0.0):g}, "
            f"learning rate x{group.get('lr_scale', 1.0):g}"
        )
        names = group.get("param_names", [f"parameter {n}" for n in range(len(parameters))])
        lines += [
            f"  {name} {tuple(parameter.shape)}"
            for name, parameter in zip(names, parameters, strict=True)
        ]
    return "\n".join(lines)


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Give every group `lr` times its own `lr_scale` (1 where a group has none).

    The value depends on nothing but the arguments, so calling it twice or after a resume
    applies no factor twice.
    """
    for group in optimizer.param_groups:
        value = lr * group.get("lr_scale", 1.0)
        if isinstance(group["lr"], Tensor):  # capturable optimizers read it on the device
            group["lr"].fill_(value)
        else:
            group["lr"] = value


def set_weight_decay(optimizer: Optimizer, weight_decay: float) -> None:
    """Give every group but `excluded` this weight decay, for runs in which it moves.

    Codreanu et al. lower it in the last fifth (arXiv 1711.04291); the authors of arXiv 1903.12650
    let it follow the learning rate's schedule.
    """
    for group in optimizer.param_groups:
        if group.get("name") != "excluded":
            group["weight_decay"] = weight_decay


def set_momentum(optimizer: Optimizer, momentum: float) -> None:
    """Give every group this momentum (the first beta of Adam and its kin).

    SP-NGD keeps it in a fixed ratio to the learning rate (arXiv 2002.06015); Smith et al. raise it
    with the batch, `1 - m ~ 1/B` (arXiv 1711.00489).

    Raises:
        UserError: The optimizer has no momentum.
    """
    for group in optimizer.param_groups:
        if "momentum" in group:
            group["momentum"] = momentum
        elif "betas" in group:
            group["betas"] = (momentum, *group["betas"][1:])
        else:
            raise UserError(
                f"optimizer: {type(optimizer).__name__} has no momentum to set. Leave the momentum "
                "schedule out."
            )


def set_progress(optimizer: Optimizer, epochs: float) -> None:
    """Tell the optimizer how many fractional epochs are done, if its update depends on it."""
    if isinstance(optimizer, FollowsProgress):
        optimizer.set_progress(epochs)
