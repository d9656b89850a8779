"""The reducer over all plans: sums, order, reuse, and what a lone worker does."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from ranks import with_reducers
from torch.distributed import HashStore

from adaptive_platform.collectives import (
    Membership,
    Reducer,
    ReducerConfig,
    RingConfig,
    TorusConfig,
)
from adaptive_platform.settings import variants_of

VARIANTS = sorted(variants_of(ReducerConfig))
SIZES = [1, 2, 3, 4, 6]


def config_of(kind: str, **fields: object) -> ReducerConfig:
    cls = variants_of(ReducerConfig)[kind]
    if "segment_kib" in cls.model_fields:
        fields = {"segment_kib": 4, **fields}  # several segments in a small buffer
    if "threshold_kib" in cls.model_fields:
        fields = {"threshold_kib": 8, **fields}  # small and large messages in one test
    return cls(timeout_seconds=20, **fields)


def values(rank: int, step: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(length, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("kind", VARIANTS)
def test_sums_for_ten_steps_with_reused_buffers(kind: str, world_size: int) -> None:
    lengths = [5003, 1, 1024]

    def body(reducer: Reducer) -> list[list[torch.Tensor]]:
        buffers = [torch.empty(length) for length in lengths]
        history = []
        for step in range(10):
            for buffer in buffers:
                buffer.copy_(values(reducer.rank, step, buffer.numel(), buffer.dtype))
            for pending in [reducer.start(buffer) for buffer in buffers]:
                pending.wait()
            history.append([buffer.clone() for buffer in buffers])
        return history

    results = with_reducers(config_of(kind), world_size, body)

    for step in range(10):
        for index, length in enumerate(lengths):
            expected = sum(
                values(rank, step, length, torch.float32).double() for rank in range(world_size)
            )
            first = results[0][step][index]
            torch.testing.assert_close(first.double(), expected, rtol=1e-6, atol=1e-6)
            for other in results[1:]:
                assert torch.equal(other[step][index], first), "workers differ in bits"


@pytest.mark.parametrize("kind", VARIANTS)
def test_lengths_that_do_not_divide(kind: str) -> None:
    cases = [(n, d) for n in (0, 1, 3, 7, 1001) for d in (torch.float32, torch.float64)]

    def body(reducer: Reducer) -> list[torch.Tensor]:
        found = []
        for length, dtype in cases:
            buffer = torch.arange(length, dtype=dtype) + reducer.rank
            reducer.start(buffer).wait()
            found.append(buffer / reducer.world_size)
        return found

    config = config_of(kind, grid=(2, 2)) if kind == "torus" else config_of(kind)
    for found in with_reducers(config, 4, body):
        for (length, dtype), mean in zip(cases, found, strict=True):
            assert mean.dtype == dtype
            assert torch.equal(mean, torch.arange(length, dtype=dtype) + 1.5)


@pytest.mark.parametrize("kind", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(kind: str, dtype: torch.dtype) -> None:
    def body(reducer: Reducer) -> torch.Tensor:
        buffer = torch.full((4097,), reducer.rank + 1.0, dtype=dtype)
        reducer.start(buffer).wait()
        return buffer

    for buffer in with_reducers(config_of(kind), 4, body):
        assert torch.equal(buffer, torch.full((4097,), 10.0, dtype=dtype))


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("kind", VARIANTS)
def test_small_talk(kind: str, world_size: int) -> None:
    def body(reducer: Reducer) -> None:
        rank, last = reducer.rank, world_size - 1
        total = torch.full((2, 2), rank + 1, dtype=torch.int64).t()
        assert reducer.all_reduce(total) is total
        assert torch.equal(total, torch.full((2, 2), world_size * (world_size + 1) // 2))
        scalar = torch.tensor(float(rank))
        reducer.broadcast(scalar, source=last)
        assert scalar.item() == last
        flags = torch.tensor([[True, rank == 0], [False, rank == last]])
        told = reducer.broadcast(flags.t(), source=last)
        assert told.tolist() == [[True, False], [last == 0, True]]
        gathered = reducer.all_gather(torch.tensor([rank, -rank], dtype=torch.int32))
        assert [each.tolist() for each in gathered] == [[r, -r] for r in range(world_size)]
        words = reducer.all_gather_object({"rank": rank, "text": "x" * 50 * rank})
        assert words == [{"rank": r, "text": "x" * 50 * r} for r in range(world_size)]
        reducer.barrier()
        assert all(each.numel() == 0 for each in reducer.all_gather(torch.empty(0)))
        with pytest.raises(ValueError, match="source"):
            reducer.broadcast(scalar, source=world_size)

    with_reducers(config_of(kind), world_size, body)


def test_operations_run_in_call_order() -> None:
    def body(reducer: Reducer) -> None:
        buffer = torch.ones(3000)
        first, second = reducer.start(buffer), reducer.start(buffer)
        seen = reducer.all_reduce(torch.ones(1))
        assert first.done
        assert second.done
        first.wait()
        second.wait()
        assert seen.item() == 4
        assert torch.equal(buffer, torch.full((3000,), 16.0))

    with_reducers(config_of("torus"), 4, body)


def test_bytes_and_seconds_count_up() -> None:
    def body(reducer: Reducer) -> tuple[int, float]:
        for _ in range(2):
            reducer.start(torch.ones(1200)).wait()
        return reducer.bytes_sent, reducer.seconds

    for sent, seconds in with_reducers(config_of("torus"), 4, body):
        assert sent == 2 * 4 * 2 * 1200 * 3 // 4
        assert seconds > 0


def test_one_worker_needs_no_store_thread_or_copy() -> None:
    before = threading.active_count()
    reducer = Reducer(TorusConfig(), Membership(HashStore(), 0, 1))
    buffer = torch.arange(5.0)
    pending = reducer.start(buffer)
    assert pending.done
    pending.wait()
    assert torch.equal(buffer, torch.arange(5.0))
    assert reducer.bytes_sent == 0
    assert threading.active_count() == before
    reducer.close()
    with pytest.raises(RuntimeError, match="closed"):
        reducer.start(buffer)


@pytest.mark.parametrize(
    "buffer", [torch.ones(2, 2), torch.ones(8)[::2], torch.ones(3, dtype=torch.int64)]
)
def test_unfit_buffers_are_refused(buffer: torch.Tensor) -> None:
    with (
        Reducer(TorusConfig(), Membership(HashStore(), 0, 1)) as reducer,
        pytest.raises(ValueError, match="1-D contiguous floating-point"),
    ):
        reducer.start(buffer)


@pytest.mark.parametrize(("lazy_kib", "at_once"), [(0, True), (1, True), (3, False)])
def test_short_reductions_wait_for_the_threshold_or_for_someone(lazy_kib, at_once) -> None:
    """Two of one KiB each: they start by themselves only where that is beyond the threshold."""

    def body(reducer: Reducer) -> tuple[bool, list[float]]:
        buffers = [torch.ones(256) for _ in range(2)]
        pending = [reducer.start(buffer) for buffer in buffers]
        started = all(each.done for each in pending)
        while at_once and not started:
            started = all(each.done for each in pending)
            time.sleep(0.001)
        for each in pending:
            each.wait()
        return started, [float(buffer.sum()) for buffer in buffers]

    config = RingConfig(timeout_seconds=20, lazy_kib=lazy_kib)
    assert with_reducers(config, 2, body) == [(at_once, [512.0, 512.0])] * 2
