"""Narrower numbers on the wire: every plan, all workers alike, sums in the buffer's own type."""

from __future__ import annotations

import pytest
import torch
from ranks import with_reducers

from adaptive_platform.collectives import (
    ParameterServerConfig,
    Reducer,
    ReducerConfig,
    RingConfig,
    TorusConfig,
)
from adaptive_platform.settings import variants_of

LENGTH = 1001


def config_of(kind: str) -> ReducerConfig:
    return variants_of(ReducerConfig)[kind](kind=kind, timeout_seconds=20)


@pytest.mark.parametrize("kind", variants_of(ReducerConfig))
@pytest.mark.parametrize("world_size", [3, 4])
@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float16], ids=str)
def test_same_bits_everywhere_and_close_to_the_sum(
    kind: str, world_size: int, wire: torch.dtype
) -> None:
    vectors = torch.randn(world_size, LENGTH, generator=torch.Generator().manual_seed(1))

    def body(reducer: Reducer) -> tuple[torch.Tensor, int]:
        buffer = vectors[reducer.rank].clone()
        for _ in range(2):  # memory of the first sum is used again
            buffer.copy_(vectors[reducer.rank])
            reducer.start(buffer, wire).wait()
        return buffer, reducer.bytes_sent

    found = with_reducers(config_of(kind), world_size, body)
    for buffer, _ in found[1:]:
        assert torch.equal(buffer, found[0][0])
    assert found[0][0].dtype == torch.float32
    step = torch.finfo(wire).eps
    worst = (found[0][0] - vectors.sum(0)).abs().max().item()
    assert worst < 4 * step * vectors.abs().sum(0).max().item()
    assert worst > 0, "nothing was rounded"


def test_half_the_bytes() -> None:
    def body(reducer: Reducer) -> tuple[int, int]:
        reducer.start(torch.zeros(LENGTH)).wait()
        whole = reducer.bytes_sent
        reducer.start(torch.zeros(LENGTH), torch.bfloat16).wait()
        return whole, reducer.bytes_sent - whole

    for whole, half in with_reducers(TorusConfig(timeout_seconds=20), 4, body):
        assert whole == 2 * half


def test_sums_are_kept_in_single_precision() -> None:
    """2048 + 1 + 1 + 1 stays 2048 in half precision; added in single precision it is 2051."""

    def body(reducer: Reducer) -> float:
        buffer = torch.tensor([2048.0 if reducer.rank == 0 else 1.0])
        reducer.start(buffer, torch.float16).wait()
        return buffer.item()

    # Rounded once, when the result is sent: to a multiple of 2.
    assert with_reducers(ParameterServerConfig(timeout_seconds=20), 4, body) == [2052.0] * 4


def test_a_wider_or_whole_type_is_refused() -> None:
    def body(reducer: Reducer) -> None:
        with pytest.raises(ValueError, match="float64"):
            reducer.start(torch.zeros(3), torch.float64)
        with pytest.raises(ValueError, match="int32"):
            reducer.start(torch.zeros(3), torch.int32)
        reducer.barrier()

    with_reducers(RingConfig(timeout_seconds=20), 2, body)
