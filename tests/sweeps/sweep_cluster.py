"""Sweeps on a Ray of two CPUs, for the test beside it: DIRECTORY; prints one JSON object."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import ray
from rich.console import Console

from adaptive_platform.errors import UserError
from adaptive_platform.sweeps.config import load_sweep
from adaptive_platform.sweeps.launch import run_sweep

folder = sys.argv[1]
FIXED = {
    "model.name": "resnet8_cifar",
    "stop.epochs": 1,
    "batch.kind": "fixed",
    "batch.global_batch": 128,
    "lr_rule.kind": "none",
    "report.evaluate_every": "0.5 epochs",
}
CONTENT = {
    "name": "two",
    "set": FIXED,
    # The last learning rate is so high that no step has a finite loss: that trial fails.
    "space": {"optimizer.lr": {"kind": "choice", "values": [0.02, 1e30]}},
    "searcher": {"kind": "grid"},
    "workers": 2,
}
ray.init(
    address="local",
    num_cpus=2,
    include_dashboard=False,
    log_to_driver=False,
    object_store_memory=128 * 2**20,
)
refused = ""
try:
    run_sweep(load_sweep({**CONTENT, "workers": 3, "out": f"{folder}/large"}))
except UserError as error:
    refused = str(error)
out = f"{folder}/sweep"
result = run_sweep(load_sweep({**CONTENT, "out": out}), console=Console(file=sys.stderr, width=200))
print(
    json.dumps(
        {
            "refused": refused,
            "exit_code": result.exit_code,
            "rows": [asdict(row) for row in result.rows],
            "best": None if result.best is None else result.best.trial,
        }
    )
)
