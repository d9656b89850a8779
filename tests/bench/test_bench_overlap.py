"""The benchmark of the overlap, on a small net."""

from __future__ import annotations

from adaptive_platform.bench import overlap as module
from adaptive_platform.models import ModelConfig


def test_one_row_from_real_steps() -> None:
    (row,) = module.overlap(quick=True, model="resnet8_cifar")
    assert row.case == "resnet8_cifar: exposed over the reduction alone"
    assert row.repeats == 8
    assert row.value > 0
    assert row.baseline is not None
    assert row.baseline > 0


def test_alone_are_the_buckets_of_the_loop() -> None:
    network = ModelConfig(name="resnet20_cifar").build(10, seed=0)
    buffers = module._buffers(network)
    assert sum(each.numel() for each in buffers) == sum(p.numel() for p in network.parameters())
