"""The torus for plain Ray actors: no Ray Train, no training, only `ray.util.collective`."""

import ray
import torch
from ray.util import collective

from adaptive_platform.cluster.ray_collective import register_torus_backend


@ray.remote(num_cpus=1)
class Worker:
    """One of the workers that sum."""

    def __init__(self, rank: int, world_size: int) -> None:
        torch.set_num_threads(1)
        self.rank, self.world_size = rank, world_size

    def join(self, group: str) -> None:
        """Every worker calls this with the same name."""
        register_torus_backend()
        collective.init_collective_group(self.world_size, self.rank, "TORUS", group)

    def leave(self, group: str) -> None:
        """Afterwards the name is free, for any number of workers."""
        collective.destroy_collective_group(group)

    def total(self, group: str) -> float:
        """The sum of all ranks, the long way."""
        vector = torch.full((1_000_000,), float(self.rank))
        collective.allreduce(vector, group)
        return vector[-1].item()


def main(world_size: int = 4) -> list[float]:
    workers = [Worker.remote(rank, world_size) for rank in range(world_size)]
    ray.get([worker.join.remote("torus") for worker in workers])
    totals = ray.get([worker.total.remote("torus") for worker in workers])
    ray.get([worker.leave.remote("torus") for worker in workers])
    return totals


if __name__ == "__main__":
    ray.init(address="local", num_cpus=4, include_dashboard=False)
    print("the sum of all ranks, as every worker sees it:", main())
    ray.shutdown()
