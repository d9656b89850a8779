"""The TORUS backend on real Ray actors."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import ray
import torch
from ray.util import collective
from ray.util.collective.types import ReduceOp

from adaptive_platform.cluster.ray_collective import register_torus_backend
from adaptive_platform.errors import UserError

pytestmark = pytest.mark.cluster
EXAMPLE = Path(__file__).parents[2] / "experiments" / "examples" / "ray_actors.py"


@ray.remote(num_cpus=1)
class Actor:
    def __init__(self, rank):
        torch.set_num_threads(1)
        self.rank = rank

    def join(self, world_size, group):
        register_torus_backend()
        register_torus_backend()
        collective.init_collective_group(world_size, self.rank, "TORUS", group)

    def leave(self, group):
        collective.destroy_collective_group(group)

    def everything(self, group):
        """Each operation once; what this worker saw."""
        rank, size = self.rank, collective.get_collective_group_size(group)
        summed = torch.arange(7.0) + rank
        collective.allreduce(summed, group)
        array = np.array([[rank, 1]], dtype=np.int64)
        collective.allreduce(array, group)
        strided = torch.full((3, 2), float(rank)).t()
        collective.allreduce(strided, group)
        part = torch.zeros(2)
        collective.reducescatter(
            part, [torch.full((2,), float(i + rank)) for i in range(size)], group
        )
        gathered = [torch.zeros(1) for _ in range(size)]
        collective.allgather(gathered, torch.tensor([float(rank)]), group)
        shared = torch.tensor([float(rank)])
        collective.broadcast(shared, 1, group)
        reduced = torch.tensor([float(rank)])
        collective.reduce(reduced, 1, group)
        collective.barrier(group)
        return {
            "summed": summed.tolist(),
            "array": array.tolist(),
            "strided": strided.tolist(),
            "part": part.tolist(),
            "gathered": [each.item() for each in gathered],
            "shared": shared.item(),
            "reduced": reduced.item(),
            "grid": collective.collective._group_mgr.get_group_by_name(group)
            ._reducer(torch.device("cpu"))
            .plan.grid,
        }

    def refused(self, group):
        messages = []
        for act in (
            lambda: collective.allreduce(torch.zeros(1), group, ReduceOp.MAX),
            lambda: collective.send(torch.zeros(1), 1 - self.rank, group),
        ):
            try:
                act()
            except UserError as error:
                messages.append(str(error))
        # Ray keeps the operation of the last call in the class: put it back.
        collective.types.AllReduceOptions.reduceOp = ReduceOp.SUM
        return messages


@pytest.fixture
def actors(shared_ray):
    made = [Actor.remote(rank) for rank in range(4)]
    yield made
    for actor in made:
        ray.kill(actor)


def test_all_operations_on_four_actors_then_again_on_two(actors):
    ray.get([actor.join.remote(4, "g") for actor in actors])
    for rank, seen in enumerate(ray.get([actor.everything.remote("g") for actor in actors])):
        assert seen["grid"] == (2, 2)
        assert seen["summed"] == [4.0 * i + 6 for i in range(7)]
        assert seen["array"] == [[6, 4]]
        assert seen["strided"] == [[6.0] * 3] * 2
        assert seen["part"] == [4.0 * rank + 6] * 2
        assert seen["gathered"] == [0.0, 1.0, 2.0, 3.0]
        assert seen["shared"] == 1.0
        assert seen["reduced"] == (6.0 if rank == 1 else rank)
    ray.get([actor.leave.remote("g") for actor in actors])
    # The same name once more, with fewer workers.
    ray.get([actor.join.remote(2, "g") for actor in actors[:2]])
    pair = actors[:2]
    assert [s["gathered"] for s in ray.get([a.everything.remote("g") for a in pair])] == [
        [0, 1]
    ] * 2
    for messages in ray.get([actor.refused.remote("g") for actor in pair]):
        assert len(messages) == 2
        assert "op = MAX" in messages[0]
        assert "GLOO" in messages[1]


def test_the_example(shared_ray):
    spec = importlib.util.spec_from_file_location("ray_actors", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.main(2) == [1.0, 1.0]
