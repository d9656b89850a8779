"""Saving a run and going on with it: read and written on rank 0, agreed on by all workers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from adaptive_platform.checkpoints.store import CheckpointConfig, read_state
from adaptive_platform.collectives import Reducer
from adaptive_platform.errors import CheckpointError, UserError
from adaptive_platform.models import average_normalization
from adaptive_platform.optimizers import ListeningOptimizer
from adaptive_platform.training.checkpoint_writer import CheckpointWriter
from adaptive_platform.training.copies import Copies
from adaptive_platform.training.evaluated import Evaluated
from adaptive_platform.training.own_parts import OwnPart
from adaptive_platform.training.state import RunState, load_checkpoint, make_checkpoint
from adaptive_platform.training.unison import agree_on_weights, from_first, raise_first

__all__ = ["Persistence"]


class Persistence:
    """The checkpoints of one run, as one worker sees them while a membership lasts.

    Writing happens on a thread of its own from a copy, so that neither this worker's next step nor
    the others wait for the storage.

    Args:
        writer: Writes and reads them on rank 0 and is left alone elsewhere; None for runs that keep
            nothing.
        config: Which are kept.
        model: The module that is trained.
        optimizer: Its optimizer.
        state: What steers the run.
        reducer: The workers.
        copies: This worker's copy of the weights among the others'.
        evaluated: Averages and snapshots of the weights.
        own: What each worker has of its own, by its name in a checkpoint; loaded in this order.
        kinds: Kinds of controller and optimizer, which own parts of a checkpoint.
        classes: Class names by number.
        tell: Reports an event as `(kind, text)`.
    """

    def __init__(
        self,
        writer: CheckpointWriter | None,
        config: CheckpointConfig,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        state: RunState,
        reducer: Reducer,
        *,
        copies: Copies,
        evaluated: Evaluated,
        own: Mapping[str, OwnPart],
        kinds: dict[str, str],
        classes: tuple[str, ...],
        tell: Callable[[str, str], None],
    ) -> None:
        self._writer = writer if reducer.rank == 0 else None
        self._config = config
        self._model = model
        self._optimizer = optimizer
        self._state = state
        self._reducer = reducer
        self._copies = copies
        self._evaluated = evaluated
        self._own = own
        self._kinds = kinds
        self._classes = classes
        self._tell = tell

    def save(self) -> None:
        """Begin a checkpoint. All workers take part; storage trouble is told, not raised."""
        average_normalization(self._model, self._reducer.all_reduce, weight=1.0)
        natural = None
        if isinstance(self._optimizer, ListeningOptimizer):
            natural = self._optimizer.natural_state()  # gathered from the workers that own parts
        own = {name: part.state_dict() for name, part in self._own.items()}
        with self._copies.agreed():
            if self._writer is None:
                return
            self.wait()
            content = self.content() | {"natural": natural} | own
            step = self._state.progress.step
            keep = self._state.best_step if self._config.keep_best else None
            # One deep copy keeps tensors that share memory sharing it in the file.
            self._writer.begin(copy.deepcopy(content), step, keep)

    def content(self) -> dict[str, Any]:
        """What a checkpoint holds of that which is the same on all workers."""
        content = make_checkpoint(
            self._model, self._optimizer, self._state, kinds=self._kinds, classes=self._classes
        )
        content["evaluated"] = self._evaluated.state_dict()
        return content

    def load(self, content: dict[str, Any]) -> list[str]:
        """Put what is the same on all workers into its owners; see `state.load_checkpoint`."""
        messages = load_checkpoint(
            content,
            self._model,
            self._optimizer,
            self._state,
            kinds=self._kinds,
            classes=self._classes,
        )
        if "evaluated" in content:
            self._evaluated.load_state_dict(content["evaluated"])
        return messages

    def poll(self) -> None:
        """Tell of a checkpoint that was finished meanwhile."""
        if self._writer is not None and self._writer.done:
            self.wait()

    def wait(self) -> None:
        """Return when the checkpoint under way is published, or has failed, and tell which."""
        told = self._writer.wait() if self._writer is not None else None
        if told is not None:
            self._tell(*told)

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
            messages += self.load(saved)
            for name, part in self._own.items():
                messages += part.load(saved.get(name))
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
        if self._writer is None:
            return b"", []
        store = self._writer.store
        found = store.load_newest()
        # Only now: what was left unfinished is no danger, and a good one might be all there is.
        removed = store.clean_partial()
        if found is None:
            told = ["no checkpoint was saved before: starting from the beginning"]
            return b"", told if must_resume else []
        _, content, messages = found
        if removed:
            messages.append(f"removed {removed} unfinished checkpoint(s)")
        return content, messages
