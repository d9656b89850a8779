"""Writes checkpoints one behind the other on a thread of its own; outlives changes of workers."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from adaptive_platform.checkpoints.store import CheckpointConfig, CheckpointStore

__all__ = ["CheckpointWriter"]


class CheckpointWriter:
    """The storage's side of saving.

    Args:
        store: Where checkpoints lie.
        config: How many are kept.
        keep_records: Makes durable what was recorded so far; called on the writing thread.
    """

    def __init__(
        self, store: CheckpointStore, config: CheckpointConfig, keep_records: Callable[[], None]
    ) -> None:
        self.store = store
        self._config = config
        self._keep_records = keep_records
        self._thread: ThreadPoolExecutor | None = None
        self._writing: Future[str] | None = None

    @property
    def done(self) -> bool:
        """True where a checkpoint was begun and is written, or failed, but was not told of."""
        return self._writing is not None and self._writing.done()

    def begin(self, content: dict[str, Any], step: int, keep: int | None) -> None:
        """Start to write `content`, which must not change any more.

        Args:
            content: A checkpoint.
            step: Committed steps it stands for.
            keep: Step of the checkpoint that is kept whatever its age; None for none.
        """
        assert self._writing is None, "wait for the last one first"
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing = self._thread.submit(self._write, content, step, keep)

    def _write(self, content: dict[str, Any], step: int, keep: int | None) -> str:
        self._keep_records()
        published = self.store.save(content, step)
        self.store.prune(self._config.keep_last, keep, newest=published)
        return published.path

    def wait(self) -> tuple[str, str] | None:
        """Return when the checkpoint under way is published or has failed, as an event to tell.

        Returns:
            `(kind, text)`; None where nothing was under way.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return None
        try:
            path = writing.result()
        except Exception as error:
            return "warning", f"checkpoint not saved, tried again when next due: {error}"
        return "checkpoint", f"saved {path}"

    def close(self) -> None:
        """Wait for what is being written and end the thread."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
