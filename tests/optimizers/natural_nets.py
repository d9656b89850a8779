"""Small nets, ranks as threads, and dense Fisher matrices for the tests of natural gradients."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
from ranks import as_threads
from torch import Tensor, nn

from adaptive_platform.optimizers import Exchange


class ThreadLinks:
    """Exchanges between threads that add up in rank order, so that all get the same bits."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.barrier = threading.Barrier(world_size, timeout=150)
        self.slots: list[Tensor | None] = [None] * world_size
        self.groups: dict[tuple[int, ...], ThreadLinks] = {}
        self.lock = threading.Lock()
        self.elements = 0

    def of(self, rank: int) -> Exchange:
        def all_reduce(tensor: Tensor) -> object:
            self.slots[rank] = tensor.clone()
            self.barrier.wait()
            total = sum(self.slots[1:], self.slots[0])
            self.barrier.wait()
            tensor.copy_(total)
            if rank == 0:
                self.elements += tensor.numel()
            return tensor

        def broadcast(tensor: Tensor, source: int) -> object:
            if rank == source:
                self.slots[source] = tensor.clone()
            self.barrier.wait()
            tensor.copy_(self.slots[source])
            self.barrier.wait()
            return tensor

        def all_gather(tensor: Tensor) -> list[Tensor]:
            self.slots[rank] = tensor.clone()
            self.barrier.wait()
            found = [slot.clone() for slot in self.slots]
            self.barrier.wait()
            if rank == 0:
                self.elements += tensor.numel()
            return found

        def subgroup(ranks: Sequence[int]) -> Exchange:
            with self.lock:
                links = self.groups.setdefault(tuple(ranks), ThreadLinks(len(ranks)))
            return links.of(list(ranks).index(rank))

        return Exchange(rank, self.world_size, all_reduce, broadcast, all_gather, subgroup)


def on_ranks(world_size: int, body: Callable[[Exchange], object]) -> list:
    links = ThreadLinks(world_size)
    return as_threads(world_size, lambda rank: body(links.of(rank)))


class SmallNet(nn.Module):
    """Two convolutions, a linear layer used twice, a head."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(2, 3, 3, padding=1, bias=False, dtype=dtype)
        self.conv2 = nn.Conv2d(3, 4, 3, stride=2, dtype=dtype)
        self.twice = nn.Linear(4, 4, dtype=dtype)
        self.head = nn.Linear(4, 3, dtype=dtype)

    def forward(self, images: Tensor) -> Tensor:
        features = self.conv2(self.conv1(images).tanh()).tanh().mean((2, 3))
        return self.head(self.twice(self.twice(features).tanh()))


_ONE_AT_A_TIME = threading.Lock()


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """The same initial weights on every thread, though they share one random state."""
    with _ONE_AT_A_TIME:
        torch.manual_seed(0)
        return make()


def small_net(dtype: torch.dtype = torch.float64) -> nn.Module:
    return seeded(lambda: SmallNet(dtype))


def samples(
    step: int, count: int = 12, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    images = torch.randn(count, 2, 6, 6, generator=generator, dtype=dtype)
    return images, torch.randint(3, (count,), generator=generator)


def losses_of(model: nn.Module, images: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(images), targets, reduction="none")


def train_step(
    model: nn.Module,
    optimizer,
    parts: Sequence[tuple[Tensor, Tensor]],
    global_batch: int,
    exchange: Exchange | None = None,
    loss_scale: float = 1.0,
) -> None:
    """One step as the loop makes it: micro-batches `parts`, sums, one reduction."""
    exchange = exchange or Exchange()
    optimizer.begin(global_batch, loss_scale)
    model.zero_grad()
    for images, targets in parts:
        (losses_of(model, images, targets).sum() * loss_scale / global_batch).backward()
    reduce_gradients(model, exchange, 1.0 / loss_scale)
    optimizer.step()


def reduce_gradients(model: nn.Module, exchange: Exchange, factor: float = 1.0) -> None:
    for param in model.parameters():
        grad = param.grad if param.grad is not None else torch.zeros_like(param)
        used = torch.tensor([float(param.grad is not None)])
        exchange.all_reduce(grad)
        exchange.all_reduce(used)
        param.grad = grad * factor if used > 0 else None


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def assert_close(left: dict[str, Tensor], right: dict[str, Tensor], rtol: float = 1e-5) -> None:
    for name, value in left.items():
        torch.testing.assert_close(
            value,
            right[name],
            rtol=rtol,
            atol=rtol * float(value.abs().max()),
            msg=lambda m, n=name: f"{n}: {m}",
        )
