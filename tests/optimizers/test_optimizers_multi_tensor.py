"""The accelerator's path, played on the CPU: one batch per type, no value asked back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from adaptive_platform.optimizers import OptimizerConfig, multi_tensor
from adaptive_platform.optimizers.multi_tensor import MultiTensorOptimizer, norms
from adaptive_platform.settings import variants_of

OURS = [
    config
    for cls in variants_of(OptimizerConfig).values()
    for config in (
        [cls.model_validate({"form": f}) for f in ("paper", "corrected", "unscaled", "clip")]
        if "form" in cls.model_fields
        else [cls()]
    )
    if not cls.needs_model
    and isinstance(config.build([("w", nn.Parameter(torch.ones(1)))]), MultiTensorOptimizer)
]
every_one_of_ours = pytest.mark.parametrize("config", OURS, ids=lambda c: repr(c)[:60])


def params(dtypes: tuple[torch.dtype, ...]) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 4), (4,), (2, 3, 3, 3), (5, 5), (6,)]
    return [
        nn.Parameter(torch.randn(shape, generator=generator).to(dtypes[i % len(dtypes)]))
        for i, shape in enumerate(shapes)
    ]


def run(config: OptimizerConfig, dtypes: tuple[torch.dtype, ...]) -> list[nn.Parameter]:
    held = params(dtypes)
    optimizer = config.build([(str(i), p) for i, p in enumerate(held)])
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        for param in held:
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        optimizer.step()
    return held


@every_one_of_ours
@pytest.mark.parametrize(
    "dtypes", [(torch.float32,), (torch.float64, torch.float32), (torch.bfloat16, torch.float32)]
)
def test_both_paths_take_the_same_step(
    config: OptimizerConfig, dtypes: tuple[torch.dtype, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_host = run(config, dtypes)
    monkeypatch.setattr(multi_tensor, "_is_host", lambda device: False)
    for ours, theirs in zip(run(config, dtypes), on_host, strict=True):
        assert ours.dtype is theirs.dtype
        torch.testing.assert_close(ours, theirs)


@every_one_of_ours
def test_an_accelerator_is_never_asked_for_a_value(
    config: OptimizerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multi_tensor, "_is_host", lambda device: False)

    def refuse(*_: Any) -> None:
        raise AssertionError("the step waits for the device")

    for name in ("item", "tolist", "__float__", "__bool__", "numpy", "cpu"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    run(config, (torch.float32,))


def test_batches_hold_one_type_each_and_go_through_multi_tensor_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(multi_tensor, "_is_host", lambda device: False)
    seen: list[tuple[torch.dtype, int]] = []
    cls = type(OURS[0].build([("w", nn.Parameter(torch.ones(1)))]))
    update = cls.update

    def spy(self: Any, group: dict[str, Any], batch: Any) -> None:
        seen.append((batch.params[0].dtype, len(batch.params)))
        update(self, group, batch)

    monkeypatch.setattr(cls, "update", spy)
    held = params((torch.float32, torch.float64))
    for param in held:
        param.grad = torch.ones_like(param)
    cls(held, lr=0.1).step()
    assert seen == [(torch.float32, 3), (torch.float64, 2)]


def test_norms_do_not_overflow_in_half_precision() -> None:
    big = torch.full((300, 300), 3.0, dtype=torch.float16)
    assert norms([big, big[:1]]).dtype is torch.float32
    torch.testing.assert_close(norms([big]), torch.tensor([900.0]))
    assert norms([big.double()]).dtype is torch.float64
