"""Door 2: a network and a data set of your own; the batch still follows the gradient noise."""

import sys

import torch
from rich.console import Console
from torch import nn
from torch.utils.data import Dataset

import adaptive_platform as ap


class Spirals(Dataset):
    """Points on two interleaved spirals; the label says which one."""

    def __init__(self, size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        turn = 3.0 * torch.rand(size, generator=generator) ** 0.5
        self.labels = torch.randint(2, (size,), generator=generator)
        angle = 2.0 * turn + torch.pi * self.labels
        points = torch.stack([turn * angle.cos(), turn * angle.sin()], dim=1)
        self.points = points + 0.1 * torch.randn(size, 2, generator=generator)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.points[index], int(self.labels[index])


def make_net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)
    )


if __name__ == "__main__":
    trainer = ap.AdaptiveTrainer(
        "quickstart",
        "optimizer.lr=0.1",
        "stop.epochs=8",
        *sys.argv[1:],
        model=make_net,
        train_data=Spirals(2000, seed=0),
        eval_data=Spirals(500, seed=1),
        classes=("clockwise", "anticlockwise"),
    )
    result = trainer.fit(console=Console())
    print(f"{result.status}: {result.steps} steps, held-out accuracy {result.accuracy:.3f}")
