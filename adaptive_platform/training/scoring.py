"""Passes over the held-out set: when it was last scored, what was best, and the record of it."""

from __future__ import annotations

import time

import torch
from torch import nn

from adaptive_platform.collectives import Reducer
from adaptive_platform.data import DataConfig, DataSource
from adaptive_platform.gradients.loss import SampleLoss
from adaptive_platform.gradients.precision import PrecisionConfig
from adaptive_platform.models import average_normalization
from adaptive_platform.report.records import EvalRecord
from adaptive_platform.training.evaluation import evaluate
from adaptive_platform.training.state import RunState
from adaptive_platform.training.telling import Teller
from adaptive_platform.training.unison import everyones

__all__ = ["Scoring"]

_BATCH = 256


class Scoring:
    """Scores the model on all workers together.

    Args:
        model: The module that is trained.
        source: Its held-out set may be None; then there is nothing to score.
        config: How samples are read.
        loss: Losses per sample.
        precision: Autocast as in training.
        memory_format: Layout of 4-D inputs.
        state: Receives the scores.
        reducer: The workers.
        tell: Names samples that could not be read.
    """

    def __init__(
        self,
        model: nn.Module,
        source: DataSource,
        config: DataConfig,
        loss: SampleLoss,
        *,
        precision: PrecisionConfig,
        memory_format: torch.memory_format,
        state: RunState,
        reducer: Reducer,
        tell: Teller,
    ) -> None:
        self._model = model
        self._source = source
        self._config = config
        self._loss = loss
        self._precision = precision
        self._memory_format = memory_format
        self._state = state
        self._reducer = reducer
        self._tell = tell

    def score(self) -> EvalRecord | None:
        """Score the held-out set, where there is one. All workers take part.

        Returns:
            What is to be recorded; None where there is nothing to score.
        """
        if self._source.eval is None:
            return None
        average_normalization(self._model, self._reducer.all_reduce, weight=1.0)
        score = evaluate(
            self._model,
            self._source.eval,
            self._config,
            self._loss,
            self._reducer,
            precision=self._precision,
            device=self._reducer.device,
            memory_format=self._memory_format,
            batch=_BATCH,
        )
        state = self._state
        state.accuracy, state.loss = score.accuracy, score.loss
        best = state.best_accuracy
        if score.accuracy is not None and (best is None or score.accuracy > best):
            state.best_accuracy, state.best_step = score.accuracy, state.progress.step
        if score.num_broken:
            self._tell.broken("held-out", everyones(self._reducer, score.broken))
        return EvalRecord(
            step=state.progress.step,
            epoch=state.progress.epoch,
            samples_seen=state.progress.samples,
            loss=score.loss,
            accuracy=score.accuracy,
            samples=score.samples,
            broken=score.num_broken,
            seconds=score.seconds,
            time=time.time(),
        )
