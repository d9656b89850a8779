"""Passes over the held-out set: when it was last scored, what was best, and the record of it."""

from __future__ import annotations

import math
import time

import torch
from torch import nn

from adaptive_platform.collectives import Reducer
from adaptive_platform.data import DataConfig, DataSource, evaluation_batches
from adaptive_platform.gradients.loss import SampleLoss
from adaptive_platform.gradients.precision import PrecisionConfig
from adaptive_platform.models import (
    NormalizationPolicy,
    average_normalization,
    recompute_statistics,
)
from adaptive_platform.report.records import EvalRecord
from adaptive_platform.training.evaluated import Ensemble, Evaluated
from adaptive_platform.training.evaluation import Score, evaluate
from adaptive_platform.training.own_share import OwnShare
from adaptive_platform.training.probe import chosen_samples, read_plainly
from adaptive_platform.training.state import RunState
from adaptive_platform.training.telling import Teller
from adaptive_platform.training.unison import everyones

__all__ = ["Scoring"]

_BATCH = 256
_RECOMPUTE_SAMPLES = 1024
"""Where the policy leaves the number open."""


class Scoring:
    """Scores the model on all workers together.

    Args:
        model: The module that is trained.
        evaluated: Says what is scored in its place.
        source: Its held-out set may be None; then there is nothing to score.
        config: How samples are read.
        loss: Losses per sample.
        precision: Autocast as in training.
        memory_format: Layout of 4-D inputs.
        state: Receives the scores.
        reducer: The workers.
        tell: Names samples that could not be read.
        policy: What batch normalization uses at evaluation.
        share: Knows the most samples of a pass.
    """

    def __init__(
        self,
        model: nn.Module,
        evaluated: Evaluated,
        source: DataSource,
        config: DataConfig,
        loss: SampleLoss,
        *,
        precision: PrecisionConfig,
        memory_format: torch.memory_format,
        state: RunState,
        reducer: Reducer,
        tell: Teller,
        policy: NormalizationPolicy,
        share: OwnShare,
    ) -> None:
        self._model = model
        self._evaluated = evaluated
        self._source = source
        self._config = config
        self._loss = loss
        self._precision = precision
        self._memory_format = memory_format
        self._state = state
        self._reducer = reducer
        self._tell = tell
        self._share = share
        self._recomputed_from = (
            chosen_samples(source.train, policy.recompute_samples or _RECOMPUTE_SAMPLES, state.seed)
            if policy.evaluation == "recomputed"
            else None
        )

    @property
    def has_samples(self) -> bool:
        """There is a held-out set."""
        return self._source.eval is not None

    @property
    def _batch(self) -> int:
        """Samples of a pass: no more than training may take, alike on all workers."""
        return min(_BATCH, self._share.largest_microbatch or _BATCH)

    def score(self) -> EvalRecord | None:
        """Score the held-out set, where there is one. All workers take part.

        Returns:
            What is to be recorded; None where there is nothing to score.
        """
        if self._source.eval is None:
            return None
        self.refresh()
        scored = self._evaluated.module(self._state.progress.step)
        if scored is not self._model and not isinstance(scored, Ensemble):
            self._recompute(scored)
        score = evaluate(
            scored,
            self._source.eval,
            self._config,
            self._loss,
            self._reducer,
            precision=self._precision,
            device=self._reducer.device,
            memory_format=self._memory_format,
            batch=self._batch,
        )
        state = self._state
        state.accuracy, state.loss = score.accuracy, score.loss
        if _beats(score, state):
            state.best_accuracy, state.best_loss = score.accuracy, score.loss
            state.best_step = state.progress.step
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

    def refresh(self) -> None:
        """Give the model's normalization what an evaluation uses; alike on all workers."""
        average_normalization(self._model, self._reducer.all_reduce, weight=1.0)
        self._recompute(self._model)

    def _recompute(self, model: nn.Module) -> None:
        """Give batch normalization the statistics of training samples, where the policy says so.

        Single samples are left out, as they have no variance of their own.
        """
        if self._recomputed_from is None:
            return
        reducer, config = self._reducer, read_plainly(self._config)
        batches = evaluation_batches(
            self._recomputed_from, config, reducer.rank, reducer.world_size, max(self._batch, 2)
        )
        moved = (each.on(reducer.device, self._memory_format) for each in batches)
        with self._precision.autocast(reducer.device.type):
            recompute_statistics(
                model, (each.inputs for each in moved if len(each) > 1), reducer.all_reduce
            )


def _beats(score: Score, state: RunState) -> bool:
    """Better than the best so far: by accuracy, or by loss where there is no accuracy."""
    if score.accuracy is not None:
        return state.best_accuracy is None or score.accuracy > state.best_accuracy
    best = math.inf if state.best_loss is None else state.best_loss
    return score.loss < best
