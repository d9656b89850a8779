"""A run with live metrics and a slow worker, for the test beside it: PORT DIRECTORY.

Stays until DIRECTORY/end.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import ray
from torch.nn import functional

from adaptive_platform.cluster.launch import launch
from adaptive_platform.recipe import load_recipe


def slow_on_one(outputs, targets):
    """Cross entropy that takes its time on the second worker."""
    if ray.train.get_context().get_world_rank() == 1:
        time.sleep(0.3)
    return functional.cross_entropy(outputs, targets, reduction="none")


port, folder = int(sys.argv[1]), Path(sys.argv[2])
ray.init(
    address="local",
    num_cpus=2,
    include_dashboard=False,
    log_to_driver=False,
    object_store_memory=128 * 2**20,
    _metrics_export_port=port,
)
recipe = load_recipe(
    "quickstart",
    [
        "model.name=resnet8_cifar",
        "workers=2",
        "batch.kind=gsnr",
        "batch.max_batch=64",
        "stop.epochs=1000",
        "report.evaluate_every=10 steps",
        "checkpoint.every=10 steps",
        "report.html=false",
        f"out={folder}/run",
    ],
)
launch(
    recipe,
    watch=lambda messages: (folder / "stop").exists(),
    sweep="try",
    loss=slow_on_one,
)
(folder / "ended").touch()
while not (folder / "end").exists():
    time.sleep(0.2)
