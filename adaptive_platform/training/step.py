"""One optimizer step on one worker: gather, measure, vote, then commit or skip.

Every worker back-propagates `sum of its losses / B`, so the reduced gradient is the mean over the
global batch however it was shared out. What the step needs to know about the others rides at the
end of the last bucket, and every worker reads the same sums, so all vote alike.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

import torch
from torch import Tensor

from adaptive_platform.errors import UserError
from adaptive_platform.gradients.buckets import GradientBuckets
from adaptive_platform.gradients.buffers import SharedBuffers
from adaptive_platform.optimizers import ListeningOptimizer
from adaptive_platform.statistics import StepMoments
from adaptive_platform.training.measured import RIDER_SLOTS, Measured, Slot
from adaptive_platform.training.ratios import Ratios
from adaptive_platform.training.step_times import times_for

__all__ = ["Step"]


class Step:
    """The state of the step in hand. Reused from step to step.

    Args:
        optimizer: Steps on `.grad`; its learning rates are set by the caller before `commit`.
        buckets: The gradients of the model, with a rider of `RIDER_SLOTS` and of the buffers.
        buffers: What forward moves in the model, such as batch norm's averages.
        clip_norm: Largest norm of the gradient that reaches the optimizer; None for any.
        rank: This worker.
        world_size: Workers; behind those of the buffers the rider has a slot for each, to compare
            their paces. 0 where it has none.
        ratios: Change the sum before it comes to all workers; `buckets` is then made with halves.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        buckets: GradientBuckets,
        buffers: SharedBuffers,
        *,
        clip_norm: float | None,
        rank: int = 0,
        world_size: int = 0,
        ratios: Ratios | None = None,
    ) -> None:
        self._rank = rank
        self._end_of_buffers = RIDER_SLOTS + buffers.num_averaged
        self._end_of_rider = self._end_of_buffers + world_size
        self._optimizer = optimizer
        self._buckets = buckets
        self._clip_norm = clip_norm
        self._ratios = ratios
        self._buffers = buffers
        # Second-order optimizers also follow forward and backward passes.
        self._listener = optimizer if isinstance(optimizer, ListeningOptimizer) else None
        self._in_hand = False
        self._times = times_for(buckets.rider.device)

    def begin(
        self,
        *,
        global_batch: int,
        microbatches: int,
        loss_scale: float,
        measure: bool,
        squares: bool = False,
        alone: bool = False,
    ) -> None:
        """Start a step.

        Args:
            global_batch: Samples that all workers are meant to train on in this step.
            microbatches: Backward passes this worker will make; may be 0.
            loss_scale: Factor on the losses, undone after the reduction.
            measure: Take the squared norms of micro-batches.
            squares: The ratios are to be taken from this step. Equal on all workers.
            alone: This worker steps with the mean gradient of its own samples; votes, counts and
                losses are summed all the same. Equal on all workers.
        """
        self._measure = measure
        self._alone = alone
        self._global_batch = global_batch
        self._expected = microbatches
        self._loss_scale = loss_scale
        self._done = 0
        device = self._buckets.rider.device
        self._sums = torch.zeros(RIDER_SLOTS, dtype=torch.float32, device=device)
        self._layer_sums = torch.zeros_like(self._buckets.layer_rider)
        self._abandoned = False
        self._in_hand = True
        self._samples = 0
        self._times.begin()
        if self._listener is not None:
            self._listener.begin(global_batch, loss_scale)
        self._buffers.keep()
        self._squares = squares
        reshape = None if self._ratios is None else self._ratios.begin(refreshing=squares)
        self._buckets.begin_step(measure=measure, squares=squares, reshape=reshape, alone=alone)

    @property
    def backward_done(self) -> int:
        """Backward passes made in this step."""
        return self._done

    def backward(self, losses: Tensor, correct: Tensor | None) -> None:
        """Back-propagate one micro-batch.

        Args:
            losses: One loss per sample, shape (b,), with its graph.
            correct: Number of right predictions, 0-dim; None where it makes no sense.

        Raises:
            UserError: `losses` is not one number per sample, so a mean or sum was taken already.
        """
        if losses.dim() != 1:
            raise UserError(
                f"losses: shape {tuple(losses.shape)}; give one loss per sample, shape (b,), such "
                "as cross_entropy(..., reduction='none'). The step takes the sum itself."
            )
        if self._done >= self._expected:
            raise UserError("backward: called more than once for one micro-batch.")
        samples = losses.numel()
        # Weighted by samples, the squares of mean gradients g_i sum to (b_i / B) g_i^2, up to what
        # `mean_squares_factor` undoes.
        self._buckets.begin_microbatch(
            last=self._done == self._expected - 1, square_weight=self._global_batch / samples
        )
        self._done += 1
        total = losses.sum()
        (total * (self._loss_scale / self._global_batch)).backward()
        sqnorm = self._buckets.end_microbatch()
        # To the squared norm of the micro-batch's own mean gradient.
        to_mean = self._global_batch / (samples * self._loss_scale)
        with torch.no_grad():
            self._sums[Slot.SQNORM] += sqnorm * to_mean**2
            self._sums[Slot.INVERSE] += 1.0 / samples
            self._sums[Slot.MICROBATCHES] += 1
            if self._measure and self._layer_sums.numel():
                self._layer_sums.add_(self._buckets.layer_sqnorms, alpha=to_mean**2)
            self._samples += samples
            self._sums[Slot.LOSS] += total.detach().float()
            if correct is not None:
                self._sums[Slot.CORRECT] += correct
                self._sums[Slot.SCORED] += samples

    def abandon(self) -> None:
        """Give up the step on this worker for want of memory; `gather` tells the others."""
        self._abandoned = True
        self._buckets.abandon()

    def gather(
        self,
        *,
        stop_requested: bool,
        broken: int,
        fatal: bool,
        change_requested: bool = False,
        durable_step: int = 0,
    ) -> Measured:
        """Reduce over all workers and read the sums. The step's only host synchronisation.

        Args:
            stop_requested: This worker was asked to stop after the step.
            broken: Samples of this worker's share that could not be read.
            fatal: This worker met an error that ends the run.
            change_requested: This worker knows that the membership is to change.
            durable_step: On the worker that keeps records: those of earlier steps are durable; 0 on
                the others. Exact up to 2^24.
        """
        if self._done != self._expected and not self._abandoned:
            raise UserError(
                f"backward: called {self._done} times for {self._expected} micro-batches of a "
                "step. Call run.backward(losses) once in each pass of the loop."
            )
        self._sums[Slot.STOP] = float(stop_requested)
        self._sums[Slot.BROKEN] = float(broken)
        self._sums[Slot.FATAL] = float(fatal)
        self._sums[Slot.OUT_OF_MEMORY] = float(self._abandoned)
        self._sums[Slot.CHANGE] = float(change_requested)
        self._sums[Slot.DURABLE] = float(durable_step)
        buckets = self._buckets
        self._sums[Slot.SAMPLES] = float(self._samples)
        if self._alone and self._samples:
            self._sums[Slot.PRESENT] = 1.0
            self._sums[Slot.OWN_SQNORM] = buckets.own_sqnorm() * self._own_factor**2
        buckets.rider[:RIDER_SLOTS].copy_(self._sums)
        self._buffers.write_to(
            buckets.rider[RIDER_SLOTS : self._end_of_buffers], weight=float(self._samples)
        )
        pace = self._times.passes_ended(self._samples)
        if self._samples and self._end_of_rider > self._end_of_buffers:
            buckets.rider[self._end_of_buffers + self._rank] = pace
        buckets.layer_rider.copy_(self._layer_sums)
        sqnorm = buckets.finish()
        both = torch.stack([sqnorm, buckets.summed_sqnorm])
        paces = buckets.rider[self._end_of_buffers : self._end_of_rider]
        parts = [buckets.used, paces, buckets.rider[:RIDER_SLOTS], both]
        if self._measure:
            parts += [buckets.layer_rider, buckets.summed_layer_sqnorms]
        together = torch.cat(parts)
        self._times.sums_ended()
        values = together.tolist()
        waited = self._times.waited()
        marks = buckets.used.numel()
        self._used, values = values[:marks], values[marks:]
        self._paces, values = values[: paces.numel()], values[paces.numel() :]
        measured = self._measured(values[:RIDER_SLOTS], values[RIDER_SLOTS:], waited)
        if self._ratios is None or not self._squares or measured.out_of_memory:
            return measured
        started = time.perf_counter()
        if measured.counts:
            scale = self.mean_factor**2 / self.mean_squares_factor
            self._ratios.refresh(measured.num_microbatches, scale)
        else:
            self._ratios.give_up()
        waited += time.perf_counter() - started
        return replace(measured, reduce_seconds=waited)

    def _measured(self, sums: list[float], sqnorms: list[float], waited: float) -> Measured:
        sqnorm, in_same_measure, layers = sqnorms[0], sqnorms[1], sqnorms[2:]
        trained = round(sums[Slot.SAMPLES])
        microbatches = round(sums[Slot.MICROBATCHES])
        # Samples left out since `begin`: the gradient is a mean over those that were read.
        self._correction = self._global_batch / (max(trained, 1) * self._loss_scale)
        grad_sqnorm = sqnorm * self._correction**2
        if self._alone:
            self._correction = self._own_factor
            grad_sqnorm = sums[Slot.OWN_SQNORM] / max(sums[Slot.PRESENT], 1.0)
        self._sqnorm = sqnorm * self._correction**2
        of_microbatches, of_sum = layers[: len(layers) // 2], layers[len(layers) // 2 :]
        in_order = self._buckets.in_model_order
        return Measured(
            finite=math.isfinite(grad_sqnorm) and math.isfinite(sums[Slot.LOSS]),
            trained=trained,
            loss=sums[Slot.LOSS] / max(trained, 1),
            accuracy=sums[Slot.CORRECT] / sums[Slot.SCORED] if sums[Slot.SCORED] > 0 else None,
            grad_sqnorm=grad_sqnorm,
            moments=StepMoments(
                micro_sqnorm=sums[Slot.SQNORM] / microbatches,
                inverse_microbatch=sums[Slot.INVERSE] / microbatches,
                num_microbatches=microbatches,
                global_sqnorm=in_same_measure * self._correction**2,
                global_batch=trained,
                preconditioned=self._buckets.preconditioned,
                layer_micro_sqnorms=[v / microbatches for v in in_order(of_microbatches)]
                if layers
                else (),
                layer_global_sqnorms=[v * self._correction**2 for v in in_order(of_sum)]
                if layers
                else (),
            )
            if self._measure and microbatches and not self._alone
            else None,
            num_microbatches=microbatches,
            stop_requests=round(sums[Slot.STOP]),
            broken=round(sums[Slot.BROKEN]),
            fatal=round(sums[Slot.FATAL]),
            out_of_memory=round(sums[Slot.OUT_OF_MEMORY]),
            change_requests=round(sums[Slot.CHANGE]),
            durable_step=round(sums[Slot.DURABLE]),
            paces=tuple(self._paces),
            reduce_seconds=waited,
            statistics_seconds=self._buckets.statistics_seconds,
        )

    @property
    def _own_factor(self) -> float:
        """Makes this worker's sum the mean over its own samples."""
        return self._global_batch / (max(self._samples, 1) * self._loss_scale)

    @property
    def own_samples(self) -> int:
        """Samples that this worker trained on in the step so far."""
        return self._samples

    @property
    def mean_factor(self) -> float:
        """After `gather`: times the reduced gradient gives the mean over the trained samples."""
        return self._correction

    @property
    def mean_squares_factor(self) -> float:
        """After `gather`: times the reduced squares gives `sum_i (b_i / B) g_i^2`.

        g_i is the mean gradient of micro-batch i of b_i samples, B the trained samples.
        """
        return self._correction / self._loss_scale

    def _clip(self) -> float:
        """The factor that clips the mean gradient, 1 where it is short enough.

        Ratios have been taken before, of gradients and squares alike; a ratio knows no factor.
        """
        norm = math.sqrt(self._sqnorm)
        if self._clip_norm is not None and norm > self._clip_norm:
            return self._clip_norm / norm
        return 1.0

    def commit(self, measured: Measured) -> None:
        """Let the optimizer step on the reduced gradient.

        Args:
            measured: What `gather` returned.
        """
        if self._alone and not self._samples:
            # Nothing to learn from here in this step; the others go on.
            self._buffers.read_from(
                self._buckets.rider[RIDER_SLOTS:], weight=float(measured.trained)
            )
            self._buckets.release()
            self._in_hand = False
            return
        factor = self._correction * self._clip()
        if not any(self._used):
            raise UserError(
                "losses: no parameter of the model has a gradient, so nothing would be trained. "
                "Were they computed by another model, a copy, or without gradients?"
            )
        if factor != 1.0:
            self._buckets.scale(factor)
        self._buckets.drop_unused(self._used)
        self._buffers.read_from(self._buckets.rider[RIDER_SLOTS:], weight=float(measured.trained))
        if self._listener is not None:
            self._listener.accept(measured.trained)
        self._optimizer.step()
        self._buckets.commit()
        self._buckets.release()
        self._in_hand = False

    def skip(self) -> str | None:
        """Drop the step: weights and optimizer were not touched, buffers go back.

        Returns:
            Name of the first parameter with a non-finite gradient; None where only losses were.
        """
        name = self._buckets.first_nonfinite()
        self.undo()
        return name

    def undo(self) -> None:
        """Put the model's buffers back and let the gradients go, as before `begin`."""
        if self._listener is not None:
            self._listener.discard()
        self._buffers.put_back()
        self._buckets.release()
        self._in_hand = False

    def give_up(self) -> None:
        """Undo the step in hand, where there is one: the workers it was shared with are gone."""
        if self._in_hand:
            self.undo()
