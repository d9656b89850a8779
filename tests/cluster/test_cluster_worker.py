"""One worker of a cluster: its device, and whom its errors concern."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adaptive_platform.cluster import rendezvous, worker
from adaptive_platform.cluster.rendezvous import device_of_worker
from adaptive_platform.errors import RunFailedError, UserError
from adaptive_platform.training.stepping import Stepping


@pytest.mark.parametrize(
    ("gpus", "visible", "device"),
    [([], "", "cpu"), ([3], "3", "cuda:0"), ([5], "4,5", "cuda:1"), (["GPU-7"], "GPU-7", "cuda:0")],
)
def test_a_worker_has_the_gpu_that_ray_gave_it_also_outside_of_ray_train(
    monkeypatch, gpus, visible, device
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(rendezvous.ray, "get_gpu_ids", lambda: gpus)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert device_of_worker() == torch.device(device)


def test_a_gpu_that_the_process_does_not_see_is_told(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(rendezvous.ray, "get_gpu_ids", lambda: [2])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(RunFailedError, match=r"CUDA_VISIBLE_DEVICES = 0,1: Ray gave .* GPU 2"):
        device_of_worker()


def test_random_numbers_are_seeded_on_the_workers_own_gpu(monkeypatch):
    seeded: list[tuple[Any, int]] = []
    current: list[Any] = [torch.device("cuda", 0)]

    class Guard:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def __enter__(self) -> None:
            current.append(self.device)

        def __exit__(self, *_: object) -> None:
            current.pop()

    monkeypatch.setattr(torch.cuda, "device", Guard)
    monkeypatch.setattr(torch.cuda, "manual_seed", lambda seed: seeded.append((current[-1], seed)))
    reducer = SimpleNamespace(rank=1, device=torch.device("cuda", 1))
    stepping: Any = SimpleNamespace(
        _recipe=SimpleNamespace(seed=4), _parts=SimpleNamespace(reducer=reducer)
    )
    with torch.random.fork_rng(devices=[]):
        Stepping._seed(stepping, 7)
    ((device, _),) = seeded
    assert device == torch.device("cuda", 1)


class Link:
    """Keeps what it was told."""

    cut_off = False

    def __init__(self) -> None:
        self.lost: list[str] = []

    def lose(self, why: str) -> bool:
        self.lost.append(why)
        return True


@pytest.mark.parametrize("joining", [None, True, False])
def test_what_keeps_one_from_joining_ends_the_run_of_nobody_else(monkeypatch, joining):
    """Before there is a run (None), while it takes the state over, and as a member."""
    ended: list[dict[str, Any]] = []
    mailbox = SimpleNamespace(end=SimpleNamespace(remote=ended.append))
    monkeypatch.setattr(worker.ray, "get", lambda found: found)
    recorder: Any = SimpleNamespace(close=lambda: None)
    job: Any = SimpleNamespace(mailbox=mailbox, loss=None)
    link = Link()
    problem = UserError("the checkpoint was made with 60 training samples, the data has 40 now")

    def build() -> Any:
        if joining is None:
            raise problem
        return SimpleNamespace(joining=joining, close=lambda: None)

    def loop(run: object, job: object) -> None:
        raise problem

    monkeypatch.setattr(worker, "_loop", loop)
    with pytest.raises(UserError):
        worker._train(job, build, recorder, link, single=False, recruited=True)  # type: ignore[arg-type]
    if joining is False:
        assert [each["exit_code"] for each in ended] == [2]
        assert link.lost == []
    else:
        assert ended == []
        assert link.lost == [f"it could not join: {problem}"]
