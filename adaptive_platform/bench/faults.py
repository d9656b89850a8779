"""What goes wrong inside a worker: a model, a data set and a loss that follow orders from files.

The driver lays an order into a folder that all workers see (one machine, one file system), named
after a place and a process; the process finds it when it comes to that place.
"""

from __future__ import annotations

import io
import math
import os
import signal
import sys
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["CLASSES", "FEATURES", "SAMPLES", "Network", "Orders", "PacedLoss", "Points"]

SAMPLES = 960
FEATURES = 16
CLASSES = 4
_WIDTH = 4096
_PACE_SECONDS = 0.03
"""A pass is made to take at least this long, so that a run is still under way when trouble ends."""


class Orders:
    """The folder with orders; without one there are none.

    Args:
        folder: Seen by the driver and all workers.
    """

    def __init__(self, folder: str | None) -> None:
        self._folder = folder

    def give(self, place: str, pid: int, content: str = "") -> None:
        """Let process `pid` do what `place` stands for, when it comes there next."""
        assert self._folder is not None
        aside = Path(self._folder, f"_{place}-{pid}")
        aside.write_text(content, encoding="utf-8")
        aside.rename(self._path(place, pid))

    def take_back(self, place: str, pid: int) -> None:
        """The order holds no longer."""
        self._path(place, pid).unlink(missing_ok=True)

    def standing(self, place: str) -> str | None:
        """Content of this process's order, which goes on to hold; None where there is none."""
        if self._folder is None:
            return None
        try:
            return self._path(place, os.getpid()).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None

    def once(self, place: str) -> bool:
        """True where there is an order, which is done with then."""
        if self.standing(place) is None:
            return False
        self.take_back(place, os.getpid())
        return True

    def note(self, text: str) -> None:
        """Add a line to what this process has to say."""
        if self._folder is not None:
            with Path(self._folder, f"notes-{os.getpid()}").open("a", encoding="utf-8") as file:
                file.write(f"{text}\n")

    def notes(self) -> dict[str, list[str]]:
        """What each process said, by its name."""
        assert self._folder is not None
        files = sorted(Path(self._folder).glob("notes-*"))
        return {file.name: file.read_text(encoding="utf-8").split() for file in files}

    def _path(self, place: str, pid: int) -> Path:
        assert self._folder is not None
        return Path(self._folder, f"{place}-{pid}")


class Points(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Numbered random rows.

    Args:
        folder: Of orders; `data` makes one sample unreadable, once.
        refused: By sample, which of its readings fail, counted from 0.
    """

    def __init__(
        self, folder: str | None = None, refused: Mapping[int, frozenset[int]] | None = None
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self._inputs = torch.randn(SAMPLES, FEATURES, generator=generator)
        self._targets = torch.randint(CLASSES, (SAMPLES,), generator=generator)
        self._orders = Orders(folder)
        self._refused = refused or {}
        self._read = dict.fromkeys(self._refused, 0)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index in self._refused:
            self._read[index] += 1
            if self._read[index] - 1 in self._refused[index]:
                raise OSError("refused")
        if self._orders.once("data"):
            raise OSError("this sample was made unreadable")
        return self._inputs[index], self._targets[index]


class Network(nn.Module):
    """A small network without batch norm, so that the result does not depend on the workers.

    Before each pass it notes a checksum of its weights.

    Args:
        folder: Of orders: `forward` and `reduction` and `saving` end the process there,
            `exception` raises, `nan-gradient` spoils the gradient.
    """

    def __init__(self, folder: str | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, _WIDTH)
        self.last = nn.Linear(_WIDTH, CLASSES)
        self._orders = Orders(folder)

    def forward(self, inputs: Tensor) -> Tensor:
        """Scores, shape (b, CLASSES), of inputs (b, FEATURES)."""
        if self.training:
            self._orders.note(f"{checksum(self):08x}")
            self._follow_orders()
        outputs: Tensor = self.last(torch.tanh(self.first(inputs)))
        if self.training and self._orders.once("nan-gradient"):
            outputs.register_hook(lambda gradient: gradient * math.nan)
        return outputs

    def _follow_orders(self) -> None:
        orders = self._orders
        if orders.once("forward"):
            end_process()
        if orders.once("exception"):
            raise RuntimeError("this pass was made to fail")
        if orders.once("reduction"):
            sys.setprofile(_end_in_reduction)
        if orders.once("saving"):
            _end_while_saving()


def checksum(module: nn.Module) -> int:
    """Of all bits of a module's parameters."""
    value = 0
    for parameter in module.parameters():
        value = zlib.crc32(parameter.detach().numpy().tobytes(), value)
    return value


class PacedLoss:
    """Cross entropy per sample, after a pause that an order `slow` makes longer.

    The order `nan-loss` spoils the loss once.

    Args:
        folder: Of orders.
        seconds_per_sample: Instead of the pause per pass.
    """

    def __init__(self, folder: str | None = None, seconds_per_sample: float | None = None) -> None:
        self._orders = Orders(folder)
        self._seconds_per_sample = seconds_per_sample

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Losses, shape (b,), of scores (b, CLASSES) and labels (b,)."""
        seconds = _PACE_SECONDS
        if self._seconds_per_sample is not None:
            seconds = len(targets) * self._seconds_per_sample
        time.sleep(seconds * float(self._orders.standing("slow") or 1.0))
        losses = F.cross_entropy(outputs, targets, reduction="none")
        return losses * math.nan if self._orders.once("nan-loss") else losses


def end_process() -> None:
    """At once, without a word to anybody."""
    os.kill(os.getpid(), signal.SIGKILL)


def _end_in_reduction(frame: FrameType, event: str, _: Any) -> None:
    """A profiler that ends the process as soon as a reduction is under way."""
    code = frame.f_code
    if event == "return" and code.co_name == "start" and "collectives" in code.co_filename:
        end_process()


def _end_while_saving() -> None:
    """The next checkpoint is written to its middle, and no further."""
    save = torch.save

    def half(state: Any, target: Any, *words: Any, **named: Any) -> None:
        if isinstance(target, io.BytesIO):  # on its way to another worker
            save(state, target, *words, **named)
            return
        whole = io.BytesIO()
        save(state, whole)
        target.write(whole.getvalue()[: whole.tell() // 2])
        target.flush()
        end_process()

    torch.save = half  # type: ignore[assignment]
