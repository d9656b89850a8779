"""The `model` part of a recipe: a network by name, built from a seed alike on every worker."""

from __future__ import annotations

import difflib
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from adaptive_platform.errors import CheckpointError, UserError
from adaptive_platform.models.cifar_resnet import CifarBlock, CifarResNet
from adaptive_platform.models.normalization import is_convolutional
from adaptive_platform.models.normalization_policy import AnyNormalization, LocalNorm
from adaptive_platform.settings import Settings

__all__ = ["ModelConfig"]

_SMALL_NETS = {"resnet8_cifar": 1, "resnet20_cifar": 3}
"""Blocks per stage."""

_FAMILIAR = frozenset(
    ["resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "vgg16_bn", "vit_b_16"]
)
"""Torchvision names that need no look at its list, whose import takes a second."""


class ModelConfig(Settings):
    """A classification network for three-channel images."""

    name: str = "resnet50"
    """A torchvision classification model, such as `resnet50`, or one of the small nets for 32x32
    images: `resnet8_cifar` (78k parameters), `resnet20_cifar` (272k)."""
    zero_gamma: bool = False
    """Start the last normalization scale of each residual block at zero, so that the block starts
    as its shortcut (Goyal et al. 2017, arXiv 1706.02677, section 5.1). Residual nets only."""
    bn_momentum: float | None = Field(default=None, gt=0, le=1)
    """Weight of the newest batch in batch normalization's running averages, in (0, 1]; null keeps
    the model's own, mostly 0.1. Runs of few steps need more."""
    normalization: AnyNormalization = LocalNorm()
    """Which samples batch normalization normalizes together, and what it uses at evaluation;
    `kind` is `local`, `group` or `ghost`. Holds for a model of your own, too."""
    channels_last: bool | None = None
    """Keep images and filters channels-last in memory, which convolutions like. Null: for
    convolution nets. It changes no name and no value."""
    compile: bool = False
    """Compile the forward pass with `torch.compile`, in place: parameter names stay."""
    weights: Path | None = None
    """File with weights to start from, as `torch.save(model.state_dict(), file)` or a checkpoint
    of this platform writes it. Must fit exactly, number of classes included."""

    def build(self, num_classes: int, seed: int) -> nn.Module:
        """The network on the CPU, in training mode; the global random state is not touched.

        Args:
            num_classes: Number of logits.
            seed: Decides the initial weights; the same on every worker.

        Raises:
            UserError: No such model, or an option it can't have.
            CheckpointError: The file of `weights` is missing, damaged or for another model.
        """
        self.check()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            model = self._create(num_classes)
        if self.zero_gamma:
            self._zero_last_scales(model)
        if self.bn_momentum is not None:
            self._set_bn_momentum(model, self.bn_momentum)
        if self.weights is not None:
            _load_weights(model, self.weights)
        if is_convolutional(model) if self.channels_last is None else self.channels_last:
            model = model.to(memory_format=torch.channels_last)
        if self.compile:
            model.compile()
        return model

    def check(self) -> None:
        """Refuse what can be refused without building the network, such as an unknown name.

        Raises:
            UserError: No such model.
            CheckpointError: The file of `weights` is missing.
        """
        if self.weights is not None and not self.weights.is_file():
            raise CheckpointError(
                f"model.weights = {self.weights}: there is no such file. Name a state dict, or "
                "null."
            )
        if self.name in _SMALL_NETS or self.name in _FAMILIAR:
            return
        # Any part of torchvision imports all of it. Past `torch._dynamo`, which building any torch
        # optimizer imports too, that is 0.1 s; the small nets go without.
        from torchvision import models

        known = models.list_models(module=models)
        if self.name not in known:
            names = [*_SMALL_NETS, *known]
            close = difflib.get_close_matches(self.name, names, n=3, cutoff=0.5)
            hint = f"Did you mean {' or '.join(close)}?" if close else "Write resnet50, for one."
            raise UserError(
                f"model.name = {self.name!r}: must be a torchvision classification model or one "
                f"of {', '.join(_SMALL_NETS)}. {hint}"
            )

    def _create(self, num_classes: int) -> nn.Module:
        if self.name in _SMALL_NETS:
            return CifarResNet(_SMALL_NETS[self.name], num_classes)
        from torchvision import models

        options: dict[str, Any] = {}
        if self.name in ("googlenet", "inception_v3"):  # else they return a tuple while training
            options = {"aux_logits": False, "init_weights": True}
        return models.get_model(self.name, weights=None, num_classes=num_classes, **options)

    def _set_bn_momentum(self, model: nn.Module, momentum: float) -> None:
        layers = [module for module in model.modules() if isinstance(module, _BatchNorm)]
        if not layers:
            raise UserError(
                f"model.bn_momentum = {momentum:g}: {self.name} has no batch normalization. Set "
                "it to null."
            )
        for layer in layers:
            layer.momentum = momentum

    def _zero_last_scales(self, model: nn.Module) -> None:
        scales = [module.bn2.weight for module in model.modules() if isinstance(module, CifarBlock)]
        if self.name not in _SMALL_NETS:
            from torchvision.models.resnet import BasicBlock, Bottleneck

            for module in model.modules():
                if isinstance(module, Bottleneck):
                    scales.append(module.bn3.weight)
                elif isinstance(module, BasicBlock):
                    scales.append(module.bn2.weight)
        if not scales:
            raise UserError(
                f"model.zero_gamma = true: {self.name} has no residual blocks with batch "
                "normalization. Set it to false, or take a ResNet."
            )
        for scale in scales:
            nn.init.zeros_(scale)


def _load_weights(model: nn.Module, path: Path) -> None:
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        reason = str(error).strip().split("\n")[0]
        raise CheckpointError(
            f"model.weights = {path}: can't be read as weights ({reason}). Save them with "
            "torch.save(model.state_dict(), file)."
        ) from error
    if isinstance(saved, Mapping) and isinstance(saved.get("model"), Mapping):
        saved = saved["model"]
    if not isinstance(saved, Mapping) or not all(isinstance(v, Tensor) for v in saved.values()):
        raise CheckpointError(
            f"model.weights = {path}: holds no state dict. Save it with "
            "torch.save(model.state_dict(), file)."
        )
    own = model.state_dict()
    wrong = [f"{name} is missing" for name in own if name not in saved]
    wrong += [f"{name} is not in the model" for name in saved if name not in own]
    wrong += [
        f"{name} has shape {tuple(saved[name].shape)} and should have {tuple(own[name].shape)}"
        for name in own
        if name in saved and saved[name].shape != own[name].shape
    ]
    if wrong:
        more = f"; and {len(wrong) - 4} more" if len(wrong) > 4 else ""
        raise CheckpointError(
            f"model.weights = {path}: does not fit the model: {'; '.join(wrong[:4])}{more}. Take "
            "weights of the same model and number of classes."
        )
    model.load_state_dict(saved)
