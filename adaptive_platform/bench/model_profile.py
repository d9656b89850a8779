"""What a model's gradients weigh and when backward has them ready, without running it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from adaptive_platform.gradients.layout import bucket_layout
from adaptive_platform.models import ModelConfig

__all__ = ["Bucket", "LayerCost", "buckets_of", "layer_costs"]


@dataclass(frozen=True, slots=True)
class LayerCost:
    """One parameter."""

    elements: int
    flops: float
    """Operations of the module that owns it, forward; counted at its first parameter only."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that are reduced together."""

    bytes: float
    ready: float
    """Share of backward after which all of them are there, in (0, 1]."""


def layer_costs(model: str, image_size: int = 224, classes: int = 1000) -> list[LayerCost]:
    """Parameters of a model in registration order, with their part of the work.

    Args:
        model: A name as in `model.name` of a recipe.
        image_size: Side of the square images in pixels.
        classes: Width of the last layer.

    Raises:
        UserError: There is no model of that name.
    """
    with torch.device("meta"):
        network = ModelConfig(name=model).build(classes, seed=0).to("meta")
    names = {module: name for name, module in network.named_modules()}
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        network.eval()(torch.empty(1, 3, image_size, image_size, device="meta"))
    counts: dict[str, dict[Any, int]] = counter.get_flop_counts()
    prefix = type(network).__name__
    found: list[LayerCost] = []
    for module, name in names.items():
        work = float(sum(counts.get(f"{prefix}.{name}", {}).values()))
        for parameter in module.parameters(recurse=False):
            found.append(LayerCost(parameter.numel(), work))
            work = 0.0
    return found


def buckets_of(
    layers: Sequence[LayerCost], element_bytes: float, bucket_bytes: float
) -> list[Bucket]:
    """Gradients in the buckets of the training loop, in the order in which they leave.

    Backward costs each layer in proportion to its forward operations (Das et al. 2016, section 3).
    """
    sizes = [int(layer.elements * element_bytes) for layer in layers]
    total = sum(layer.flops for layer in layers)
    found: list[Bucket] = []
    done = 0.0
    for members in bucket_layout(sizes, int(bucket_bytes)):
        done += sum(layers[index].flops for index in members)
        found.append(Bucket(float(sum(sizes[index] for index in members)), done / total))
    return found
