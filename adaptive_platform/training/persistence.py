"""Saving a run and going on with it: read and written on rank 0, agreed on by all workers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from adaptive_platform.checkpoints.store import CheckpointConfig, CheckpointStore, read_state
from adaptive_platform.collectives import Reducer
from adaptive_platform.errors import CheckpointError, UserError
from adaptive_platform.models import average_normalization
from adaptive_platform.optimizers import ListeningOptimizer
from adaptive_platform.training.copies import Copies
from adaptive_platform.training.evaluated import Evaluated
from adaptive_platform.training.mixing import Mixing
from adaptive_platform.training.sparse_exchange import SparseExchange
from adaptive_platform.training.state import RunState, load_checkpoint, make_checkpoint
from adaptive_platform.training.unison import agree_on_weights, from_first, raise_first

__all__ = ["Persistence"]


class Persistence:
    """The checkpoints of one run, as one worker sees them.

    Writing happens on a thread of its own from a copy, so that neither this worker's next step nor
    the others wait for the storage.

    Args:
        store: Where checkpoints lie; None on ranks other than 0 and for runs that keep nothing.
        config: How many are kept.
        model: The module that is trained.
        optimizer: Its optimizer.
        state: What steers the run.
        reducer: The workers.
        copies: This worker's copy of the weights among the others'.
        evaluated: Averages and snapshots of the weights.
        mixing: This worker's mixed batches.
        sparse: Holds what was not sent yet, where gradients travel sparsely.
        kinds: Kinds of controller and optimizer, which own parts of a checkpoint.
        classes: Class names by number.
        tell: Reports an event as `(kind, text)`.
        keep_records: Makes durable what was recorded so far; called on the writing thread.
    """

    def __init__(
        self,
        store: CheckpointStore | None,
        config: CheckpointConfig,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        state: RunState,
        reducer: Reducer,
        *,
        copies: Copies,
        evaluated: Evaluated,
        mixing: Mixing,
        sparse: SparseExchange | None = None,
        kinds: dict[str, str],
        classes: tuple[str, ...],
        tell: Callable[[str, str], None],
        keep_records: Callable[[], None],
    ) -> None:
        self._store = store
        self._config = config
        self._model = model
        self._optimizer = optimizer
        self._state = state
        self._reducer = reducer
        self._copies = copies
        self._evaluated = evaluated
        self._mixing = mixing
        self._sparse = sparse
        self._kinds = kinds
        self._classes = classes
        self._tell = tell
        self._keep_records = keep_records
        self._writer = ThreadPoolExecutor(1, "checkpoint") if store is not None else None
        self._writing: Future[str] | None = None

    def save(self) -> None:
        """Begin a checkpoint. All workers take part; storage trouble is told, not raised."""
        average_normalization(self._model, self._reducer.all_reduce, weight=1.0)
        natural = None
        if isinstance(self._optimizer, ListeningOptimizer):
            natural = self._optimizer.natural_state()  # gathered from the workers that own parts
        sync = self._copies.state_dict()
        batches = self._mixed_batches()
        waiting = self._sparse.state_dict() if self._sparse is not None else None
        with self._copies.agreed():
            if self._store is None or self._writer is None:
                return
            self.wait()
            content = make_checkpoint(
                self._model, self._optimizer, self._state, kinds=self._kinds, classes=self._classes
            )
            content["natural"] = natural
            content["sync"] = sync
            content["mixing"] = batches
            content["evaluated"] = self._evaluated.state_dict()
            content["sparse"] = waiting
            step = self._state.progress.step
            keep = self._state.best_step if self._config.keep_best else None
            # One deep copy keeps tensors that share memory sharing it in the file.
            self._writing = self._writer.submit(
                self._write, self._store, copy.deepcopy(content), step, keep
            )

    def _mixed_batches(self) -> list[dict[str, torch.Tensor]] | None:
        """Every worker's, in rank order; None where nothing of them is needed."""
        if not self._mixing.remembers:
            return None
        return self._reducer.all_gather_object(self._mixing.state_dict())

    def _take_up_mixing(self, saved: list[dict[str, torch.Tensor]] | None) -> list[str]:
        """With as many workers as before each goes on from its own; else what people should know.

        Mixing starts from the plain samples then, as at the beginning of a run.
        """
        if saved is None or not self._mixing.remembers:
            return []
        if len(saved) != self._reducer.world_size:
            return [
                f"mixup.running: the mixed batches of {len(saved)} workers are left out, as the "
                "number of workers changed."
            ]
        self._mixing.load_state_dict(saved[self._reducer.rank], self._reducer.device)
        return []

    def _write(
        self, store: CheckpointStore, content: dict[str, Any], step: int, keep: int | None
    ) -> str:
        self._keep_records()
        published = store.save(content, step)
        store.prune(self._config.keep_last, keep)
        return published.path

    def poll(self) -> None:
        """Tell of a checkpoint that was finished meanwhile."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def wait(self) -> None:
        """Return when the checkpoint under way is published, or has failed, and tell which."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            path = writing.result()
        except Exception as error:
            self._tell("warning", f"checkpoint not saved, tried again when next due: {error}")
            return
        self._tell("checkpoint", f"saved {path}")

    def close(self) -> None:
        """Wait for what is being written and end the thread."""
        self.wait()
        if self._writer is not None:
            self._writer.shutdown()

    def restore(self, *, must_resume: bool) -> bool:
        """Go on from the newest valid checkpoint, where there is one.

        Returns:
            True when there was one; else all workers start from rank 0's weights.

        Raises:
            CheckpointError: None is valid, or it does not fit; on every worker alike.
        """
        content = b""
        messages: list[str] = []
        error: UserError | None = None
        try:
            content, messages = self._newest(must_resume)
        except UserError as failure:
            error = failure
        except Exception as failure:
            error = CheckpointError(f"resume: the checkpoints can't be read ({failure}).")
        raise_first(self._reducer, error)
        device = next(self._model.parameters()).device
        content = from_first(self._reducer, content, device)
        if content:
            saved = read_state(content)
            messages += load_checkpoint(
                saved,
                self._model,
                self._optimizer,
                self._state,
                kinds=self._kinds,
                classes=self._classes,
            )
            messages += self._copies.load(saved.get("sync"))
            messages += self._take_up_mixing(saved.get("mixing"))
            if "evaluated" in saved:
                self._evaluated.load_state_dict(saved["evaluated"])
            if self._sparse is not None:
                messages += self._sparse.load(saved.get("sparse"))
            progress = self._state.progress
            messages.append(
                f"resumed at step {progress.step}, epoch {progress.position:.2f}, "
                f"with {self._reducer.world_size} worker(s)"
            )
        else:
            agree_on_weights(self._reducer, self._model)
            self._copies.begin()
        for message in messages:
            self._tell("resume", message)
        return bool(content)

    def _newest(self, must_resume: bool) -> tuple[bytes, list[str]]:
        if self._store is None:
            return b"", []
        found = self._store.load_newest()
        # Only now: what was left unfinished is no danger, and a good one might be all there is.
        removed = self._store.clean_partial()
        if found is None:
            told = ["no checkpoint was saved before: starting from the beginning"]
            return b"", told if must_resume else []
        _, content, messages = found
        if removed:
            messages.append(f"removed {removed} unfinished checkpoint(s)")
        return content, messages
