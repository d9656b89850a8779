"""Elastic averaging and gossip without waiting, with real staleness, on plain Ray actors.

    python experiments/studies/asynchronous.py
    python experiments/studies/asynchronous.py --workers 4 --period 4 --slow 3

Jin et al. 2016 (arXiv 1611.04581) compare asynchronous elastic averaging and gossiping SGD with
synchronous SGD. `sync: {kind: easgd}` and `{kind: gossip}` of a recipe exchange in lockstep; here
each worker is an actor that meets the others only through one more actor, which answers whoever
comes first. One worker may be slow (`--slow 3`: it sleeps two steps' time after each): in lockstep
all wait for it, without it they do not, and what is read grows old. Both get the same number of
steps in all. Staleness of elastic averaging: exchanges of others since the worker's last one; of
gossip: steps that the worker is ahead of what it read. Nothing can be resumed here, and the run is
another one every time.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import ray
import torch
from torch import Tensor
from torch.nn import functional as F

from adaptive_platform.data.digits import DigitsConfig
from adaptive_platform.models import ModelConfig
from adaptive_platform.sync import FlatWeights


@dataclass
class Centre:
    """The centre of elastic averaging; requests are served one by one, in order of arrival."""

    weights: Tensor
    share: float
    """alpha: of the way between a worker and the centre, that each of them goes."""
    budget: int
    """Steps of all workers together."""
    steps: int = 0
    exchanges: int = 0
    last: dict[int, int] = field(default_factory=dict)

    def exchange(self, rank: int, weights: Tensor, steps: int) -> tuple[Tensor, int, bool]:
        """Draw worker and centre together: `d = alpha (x - centre); centre += d`.

        Returns:
            d, which the worker takes off; its staleness; and whether the budget is spent.
        """
        difference = self.share * (weights - self.weights)
        self.weights = self.weights + difference
        stale = self.exchanges - self.last.get(rank, self.exchanges)
        self.exchanges += 1
        self.last[rank] = self.exchanges
        self.steps += steps
        return difference, stale, self.steps >= self.budget

    def result(self) -> Tensor:
        """The centre."""
        return self.weights


@dataclass
class Board:
    """What every worker published last; reading a peer's does not involve the peer."""

    weights: Tensor
    """Of all workers at the start."""
    budget: int
    steps: int = 0
    published: dict[int, tuple[Tensor, int]] = field(default_factory=dict)

    def exchange(
        self, rank: int, weights: Tensor, steps: int, own_step: int, peer: int
    ) -> tuple[Tensor, int, bool]:
        """Publish, then read: `x = (x + x_j) / 2`; drawing oneself changes nothing.

        Returns:
            The worker's new weights; its staleness; and whether the budget is spent.
        """
        self.published[rank] = (weights, own_step)
        other, at = self.published.get(peer, (self.weights, 0))
        self.steps += steps
        return (weights + other) / 2, max(own_step - at, 0), self.steps >= self.budget


class Worker:
    """Trains alone on digits, and exchanges weights every `period` steps."""

    def __init__(self, rank: int, options: dict[str, Any], other: Any) -> None:
        torch.set_num_threads(1)
        self.rank, self.options, self.other = rank, options, other
        self.model, self.images, self.labels = load()
        self.flat = FlatWeights(self.model.parameters())
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=options["lr"], momentum=0.9, nesterov=True
        )
        self.generator = torch.Generator().manual_seed(1 + rank)
        self.order = torch.empty(0, dtype=torch.int64)
        self.stale: list[int] = []
        self.steps = 0

    def run(self) -> None:
        """Rounds without waiting for anyone, until the budget is spent."""
        while not self.round():
            pass

    def round(self) -> bool:
        """`period` steps and one exchange; true when the budget is spent."""
        for _ in range(self.options["period"] - 1):
            self.step()
        if self.options["method"] == "gossip":
            self.step()
            peer = int(torch.randint(self.options["workers"], (), generator=self.generator))
            call = self.other.exchange.remote(
                self.rank, self.flat.read(), self.options["period"], self.steps, peer
            )
            weights, stale, over = ray.get(call)
            self.flat.write(weights)
        else:
            # The gradient is taken before the exchange and applied after it.
            _, stale, over = self.step(
                lambda: ray.get(
                    self.other.exchange.remote(self.rank, self.flat.read(), self.options["period"])
                )
            )
        self.stale.append(stale)
        return bool(over)

    def step(self, exchange: Any = None) -> Any:
        """One step on this worker's own stream; `exchange` comes between gradient and update."""
        began = time.perf_counter()
        if len(self.order) < self.options["batch"]:
            self.order = torch.randperm(len(self.labels), generator=self.generator)
        chosen = self.order[: self.options["batch"]]
        self.order = self.order[self.options["batch"] :]
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(self.images[chosen]), self.labels[chosen]).backward()
        found = None
        if exchange is not None:
            found = exchange()
            self.flat.write(self.flat.read() - found[0])
        self.optimizer.step()
        self.steps += 1
        if self.rank == 0 and self.options["slow"] > 1:
            time.sleep((self.options["slow"] - 1) * (time.perf_counter() - began))
        return found

    def result(self) -> tuple[Tensor, list[Tensor], int, list[int]]:
        """Weights, buffers, steps, and the staleness of every exchange."""
        buffers = [b.float() for b in self.model.buffers()]
        return self.flat.read(), buffers, self.steps, self.stale


def load(held_out: bool = False) -> tuple[torch.nn.Module, Tensor, Tensor]:
    """The network with its first weights, and normalized digits of 8x8 pixels."""
    config = DigitsConfig(image_size=8)
    source = config.open()
    samples: Any = source.eval if held_out else source.train
    images = (samples.pixels.float() / 255.0 - config.mean[0]) / config.std[0]
    model = ModelConfig(name="resnet8_cifar", bn_momentum=0.3).build(10, seed=0)
    return model, images.expand(-1, 3, -1, -1), samples.labels


def measure(options: dict[str, Any], lockstep: bool) -> dict[str, Any]:
    """One run: accuracy of the agreed weights, seconds, steps by worker and staleness."""
    model, images, labels = load(held_out=True)
    flat = FlatWeights(model.parameters())
    workers, budget = options["workers"], options["steps"] * options["workers"]
    if options["method"] == "gossip":
        other = ray.remote(num_cpus=0)(Board).remote(flat.read(), budget)
    else:
        share = options["beta"] / workers
        other = ray.remote(num_cpus=0)(Centre).remote(flat.read(), share, budget)
    actor = ray.remote(num_cpus=1)(Worker)
    crew = [actor.remote(rank, options, other) for rank in range(workers)]
    ray.get([worker.result.remote() for worker in crew])  # all are up
    began = time.perf_counter()
    if lockstep:
        while not any(ray.get([worker.round.remote() for worker in crew])):
            pass
    else:
        ray.get([worker.run.remote() for worker in crew])
    seconds = time.perf_counter() - began
    weights, buffers, steps, stale = zip(
        *ray.get([worker.result.remote() for worker in crew]), strict=True
    )
    agreed = torch.stack(weights).mean(0)
    flat.write(ray.get(other.result.remote()) if options["method"] == "easgd" else agreed)
    for buffer, values in zip(model.buffers(), zip(*buffers, strict=True), strict=True):
        buffer.copy_(torch.stack(values).mean(0))
    model.eval()
    with torch.no_grad():
        right = (model(images).argmax(1) == labels).float().mean().item()
    ages = [age for each in stale for age in each]
    for one in (*crew, other):
        ray.kill(one)
    return {
        "accuracy": right,
        "seconds": seconds,
        "steps": steps,
        "mean staleness": sum(ages) / len(ages),
        "largest": max(ages),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200, help="per worker, on average")
    parser.add_argument("--period", type=int, default=4, help="tau")
    parser.add_argument("--batch", type=int, default=32, help="of one worker")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--beta", type=float, default=0.8, help="p times the moving rate")
    parser.add_argument("--slow", type=float, default=3.0, help="how much slower worker 0 is")
    parser.add_argument("--methods", nargs="+", default=["easgd", "gossip"])
    options = vars(parser.parse_args())
    ray.init(
        address="local",
        num_cpus=options["workers"],
        include_dashboard=False,
        object_store_memory=100 * 2**20,
    )
    for method in options["methods"]:
        for lockstep in (True, False):
            found = measure(options | {"method": method}, lockstep)
            print(f"{method}, {'lockstep' if lockstep else 'asynchronous'}: {found}", flush=True)
    ray.shutdown()


if __name__ == "__main__":
    sys.exit(main())
