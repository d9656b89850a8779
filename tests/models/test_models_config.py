"""Models by name: the same on every worker, options that do what they say, errors for people."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from adaptive_platform.errors import CheckpointError, UserError
from adaptive_platform.models import ModelConfig
from adaptive_platform.models.cifar_resnet import CifarBlock

IMAGES = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "parameters"), [("resnet8_cifar", 78_042), ("resnet20_cifar", 272_474)]
)
def test_small_nets(name: str, parameters: int) -> None:
    model = ModelConfig(name=name).build(10, seed=0)
    assert size(model) == parameters
    assert model(IMAGES).shape == (4, 10)


def test_resnet50_is_the_default_and_takes_the_number_of_classes() -> None:
    model = ModelConfig().build(7, seed=0)
    assert size(model) == 23_508_032 + 2048 * 7 + 7


@pytest.mark.parametrize("name", ["resnet8_cifar", "squeezenet1_1"])
def test_the_seed_decides_the_weights_and_the_global_state_stays(name: str) -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first, second, other = (ModelConfig(name=name).build(5, seed=s) for s in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), state)
    values = zip(first.parameters(), second.parameters(), other.parameters(), strict=True)
    matches = [(torch.equal(a, b), torch.equal(a, c)) for a, b, c in values]
    assert all(same for same, _ in matches)
    assert not all(same for _, same in matches)


def test_models_that_would_return_a_tuple_return_logits() -> None:
    model = ModelConfig(name="googlenet").build(3, seed=0)
    assert model(torch.randn(2, 3, 64, 64)).shape == (2, 3)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("resnet5O", "resnet50"),
        ("resnet8_cifra", "resnet8_cifar"),
        ("zzz", "Write resnet50"),
        ("deeplabv3_resnet50", "wide_resnet50_2"),
    ],
)
def test_an_unknown_name_is_refused_with_what_comes_close(name: str, hint: str) -> None:
    with pytest.raises(UserError, match=rf"model\.name = '{name}'.*{hint}"):
        ModelConfig(name=name).check()


def test_zero_gamma_blocks_start_as_their_shortcut() -> None:
    model = ModelConfig(name="resnet8_cifar", zero_gamma=True).build(10, seed=0)
    block = next(m for m in model.modules() if isinstance(m, CifarBlock))
    features = torch.randn(2, 16, 8, 8)
    assert torch.equal(block(features), features.relu())
    assert block.bn1.weight.min() == 1


@pytest.mark.parametrize(("name", "last"), [("resnet18", "bn2"), ("resnet50", "bn3")])
def test_zero_gamma_on_torchvision(name: str, last: str) -> None:
    model = ModelConfig(name=name, zero_gamma=True).build(10, seed=0)
    for key, value in model.named_parameters():
        if "bn" in key and key.endswith("weight"):
            zero = key.startswith("layer") and f".{last}." in key
            assert bool((value == 0).all()) == zero, key


def test_zero_gamma_is_refused_where_it_means_nothing() -> None:
    with pytest.raises(UserError, match=r"zero_gamma = true: squeezenet1_1 has no residual"):
        ModelConfig(name="squeezenet1_1", zero_gamma=True).build(10, seed=0)


def test_bn_momentum_is_refused_where_it_means_nothing() -> None:
    with pytest.raises(UserError, match=r"bn_momentum = 0.3: squeezenet1_1 has no batch"):
        ModelConfig(name="squeezenet1_1", bn_momentum=0.3).build(10, seed=0)


def test_bn_momentum_and_memory_layout() -> None:
    model = ModelConfig(name="resnet8_cifar", bn_momentum=0.3).build(10, seed=0)
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert {norm.momentum for norm in norms} == {0.3}
    assert model.conv1.weight.is_contiguous(memory_format=torch.channels_last)
    plain = ModelConfig(name="resnet8_cifar", channels_last=False).build(10, seed=0)
    assert not plain.conv1.weight.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(plain.conv1.weight, model.conv1.weight)


def test_compiling_keeps_names_and_values() -> None:
    plain = ModelConfig(name="resnet8_cifar").build(10, seed=0)
    model = ModelConfig(name="resnet8_cifar", compile=True).build(10, seed=0)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert model._compiled_call_impl is not None


def test_weights_round_trip_also_from_a_checkpoint(tmp_path: Path) -> None:
    source = ModelConfig(name="resnet8_cifar").build(10, seed=5)
    torch.save(source.state_dict(), tmp_path / "plain.pt")
    torch.save({"model": source.state_dict(), "step": 3}, tmp_path / "checkpoint.pt")
    for file in ("plain.pt", "checkpoint.pt"):
        model = ModelConfig(name="resnet8_cifar", weights=tmp_path / file).build(10, seed=0)
        assert torch.equal(model.fc.weight, source.fc.weight)


def test_weights_that_do_not_fit_are_refused_in_words(tmp_path: Path) -> None:
    file = tmp_path / "weights.pt"

    def refused() -> str:
        with pytest.raises(CheckpointError) as caught:
            ModelConfig(name="resnet8_cifar", weights=file).build(10, seed=0)
        return str(caught.value)

    assert "there is no such file" in refused()
    file.write_bytes(b"not a file of weights")
    assert "can't be read as weights" in refused()
    torch.save([1, 2], file)
    assert "holds no state dict" in refused()
    torch.save(ModelConfig(name="resnet8_cifar").build(12, seed=0).state_dict(), file)
    assert "fc.weight has shape (12, 64) and should have (10, 64)" in refused()
    torch.save(ModelConfig(name="resnet20_cifar").build(10, seed=0).state_dict(), file)
    assert "stages.0.1.conv1.weight is not in the model" in refused()
    assert "and 68 more. Take weights of the same model" in refused()


def test_small_nets_do_not_import_torchvision() -> None:
    code = (
        "import sys; from adaptive_platform.models import ModelConfig; "
        "import adaptive_platform.optimizers; ModelConfig(name='resnet8_cifar').build(10, 0); "
        "assert not {'torchvision', 'ray', 'scipy', 'pandas', 'sklearn'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
