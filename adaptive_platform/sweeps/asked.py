"""What ends a sweep early, a signal or its time: trials save and leave, then Tune ends."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

from ray.tune import Callback

from adaptive_platform.storage import exists, join, open_location, write_bytes
from adaptive_platform.sweeps.trial import STOP_NAME

__all__ = ["Asked", "asked_to_end", "on_main_thread"]


@dataclass(slots=True)
class Asked(Callback):
    """What was asked for, and the part of Tune's loop that insists on it."""

    exit_code: int = 0
    out_of_time: bool = False

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        """Tune is still going: a signal that came before it listened is sent again."""
        if (self.exit_code or self.out_of_time) and on_main_thread():
            signal.raise_signal(signal.SIGUSR1)


@contextmanager
def asked_to_end(path: str, seconds: float | None) -> Iterator[Asked]:
    """Signals and the end of the time budget: trials save and leave, then Tune ends.

    Tune stops on SIGUSR1; its own SIGINT handler would end trials without asking them. A second
    signal leaves at once. Elsewhere than on the main thread there are no signals, and Tune is given
    the time budget as well.
    """
    asked = Asked()
    system, root = open_location(path)
    main = on_main_thread()
    over = threading.Event()

    def stop() -> None:
        with suppress(OSError):
            write_bytes(system, join(root, STOP_NAME), b"")
        if main:
            os.kill(os.getpid(), signal.SIGUSR1)

    def on_signal(number: int, frame: FrameType | None) -> None:
        if asked.exit_code:
            raise KeyboardInterrupt
        asked.exit_code = 128 + number
        stop()

    def on_time() -> None:
        if seconds is not None and not over.wait(seconds):
            asked.out_of_time = True
            stop()

    numbers = (signal.SIGINT, signal.SIGTERM) if main else ()
    before = {number: signal.getsignal(number) for number in (*numbers, signal.SIGUSR1)}
    if main:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until Tune takes it over
    for number in numbers:
        signal.signal(number, on_signal)
    timer = threading.Thread(target=on_time, name="sweep-budget", daemon=True)
    timer.start()

    def forget() -> None:
        with suppress(OSError):
            if exists(system, join(root, STOP_NAME)):
                system.delete_file(join(root, STOP_NAME))

    forget()  # what an attempt left that was killed
    try:
        yield asked
    finally:
        over.set()
        if main:
            for number, handler in before.items():
                signal.signal(number, handler)
        forget()


def on_main_thread() -> bool:
    """True where signals can be received."""
    return threading.current_thread() is threading.main_thread()
