"""What the submitted jobs of the test beside it run: MODE DIRECTORY, on one worker."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from torch.nn import functional

import adaptive_platform as ap

mode, folder = sys.argv[1], Path(sys.argv[2])


class Troubled:
    """Cross entropy that fails in its third call: always, or once by killing its process."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, outputs, targets):
        self.calls += 1
        if self.calls == 3 and mode == "fails":
            raise RuntimeError("step three is cursed")
        if self.calls == 3 and mode == "recovers" and not (folder / "killed").exists():
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return functional.cross_entropy(outputs, targets, reduction="none")


trainer = ap.AdaptiveTrainer(
    "quickstart",
    "model.name=resnet8_cifar",
    "workers=1",
    "batch.kind=fixed",
    "stop.steps=6",
    "lr_rule.kind=none",
    "checkpoint.every=2 steps",
    "report.html=false",
    f"max_failures={int(mode == 'recovers')}",
    f"out={folder / mode}",
    loss=Troubled(),
)
result = trainer.fit()
print(f"ended {result.status} after {result.steps} steps")
