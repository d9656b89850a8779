"""Pictures on their way into a run: cached over the workers, and the record says what they cost."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from coloured_pictures import jpeg
from ranks import as_threads
from runs import Watcher, recipe
from torch import nn
from torch.distributed import HashStore
from torch.nn import functional as F

from adaptive_platform.collectives import Membership
from adaptive_platform.data import SampleStream
from adaptive_platform.training.run import TrainingRun

SIZE = 12


@pytest.fixture
def pictures(tmp_path):
    for label, name in enumerate(("red", "green", "blue")):
        (tmp_path / name).mkdir()
        for index in range(SIZE // 3):
            (tmp_path / name / f"{index}.jpg").write_bytes(jpeg(label, index))
    return tmp_path


def train(folder, world, *overrides):
    """Weights and step records of two epochs in the order of ranks."""
    # Without augmentation: workers on threads share one generator, which processes do not.
    fields = (f"data.train={folder}", "batch.global_batch=4")
    config = recipe("data.kind=image_folder", *fields, *overrides)
    store = HashStore()
    models = []
    for _ in range(world):
        torch.manual_seed(0)
        models.append(
            nn.Sequential(nn.Conv2d(3, 4, 5, stride=4), nn.Flatten(), nn.Linear(4 * 49, 3))
        )

    def work(rank):
        watcher = Watcher()
        with TrainingRun(
            config,
            models[rank],
            config.data.open(),
            config.data,
            Membership(store, rank, world),
            observer=watcher,
        ) as run:
            for batch in run:
                assert batch.inputs.dtype == torch.float32, "normalized before the model sees it"
                outputs = run.model(batch.inputs)
                run.backward(F.cross_entropy(outputs, batch.targets, reduction="none"), outputs)
        return watcher

    watchers = as_threads(world, work)
    return [p.detach() for p in models[0].parameters()], watchers[0]


@pytest.mark.parametrize("world", [1, 2])
def test_a_cache_changes_no_weight_and_its_memory_is_recorded(pictures, world):
    weights, watcher = train(pictures, world)
    cached_weights, cached = train(pictures, world, "data.cache_mib=1")
    for ours, theirs in zip(cached_weights, weights, strict=True):
        assert torch.equal(ours, theirs)
    assert [r.sample_ids for r in cached.steps] == [r.sample_ids for r in watcher.steps]
    assert {record.cache_mib for record in watcher.steps} == {0.0}
    files = sorted(
        pictures.glob("*/*.jpg"), key=lambda path: ("b g r".find(path.parent.name[0]), path)
    )
    mine = sum(path.stat().st_size for path in files[::world])
    assert cached.steps[-1].cache_mib == pytest.approx(mine / 2**20)
    assert any("kept in memory" in event.text for event in cached.events)


def test_the_record_says_how_long_a_step_waited_for_its_data(pictures, monkeypatch):
    take = SampleStream.take
    monkeypatch.setattr(
        SampleStream, "take", lambda self, *a: replace(take(self, *a), wait_seconds=1.25)
    )
    _, watcher = train(pictures, 1)
    assert {record.data_seconds for record in watcher.steps} == {1.25}
