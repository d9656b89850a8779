"""Scores cover exactly the held-out data, whatever number of workers shares it."""

import pytest
import torch
from ranks import with_reducers
from torch import nn
from torch.nn import functional as F

from adaptive_platform.collectives import RingConfig
from adaptive_platform.data import PythonConfig, wrap_dataset
from adaptive_platform.gradients.precision import PrecisionConfig
from adaptive_platform.training.evaluation import evaluate


def points(size):
    generator = torch.Generator().manual_seed(size)
    inputs = torch.randn(size, 5, generator=generator)
    return inputs, torch.randint(3, (size,), generator=generator)


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


@pytest.mark.parametrize("size", [1, 13])
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_a_score_is_that_of_the_whole_set_at_any_number_of_workers(world, size):
    inputs, targets = points(size)
    model = net().eval()
    copies = [net() for _ in range(world)]
    with torch.no_grad():
        outputs = model(inputs)
    loss = float(F.cross_entropy(outputs, targets))
    accuracy = float((outputs.argmax(1) == targets).float().mean())
    samples = wrap_dataset(torch.utils.data.TensorDataset(inputs, targets)).train

    def score(reducer):
        return evaluate(
            copies[reducer.rank],
            samples,
            PythonConfig(),
            lambda outputs, targets: F.cross_entropy(outputs, targets, reduction="none"),
            reducer,
            precision=PrecisionConfig(),
            device=torch.device("cpu"),
            memory_format=torch.contiguous_format,
            batch=2,
        )

    for found in with_reducers(RingConfig(timeout_seconds=20), world, score):
        assert found.samples == size
        assert found.loss == pytest.approx(loss, rel=1e-5)
        assert found.accuracy == pytest.approx(accuracy)
