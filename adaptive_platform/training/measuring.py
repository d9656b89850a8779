"""Supplies what a batch controller needs: noise, curvature, speed, ratios; says what it can't."""

from __future__ import annotations

from adaptive_platform.collectives import Membership, Reducer
from adaptive_platform.controllers import Decision, Limits, Observation
from adaptive_platform.controllers.worker_count import WorkerAdvice, advise_workers
from adaptive_platform.errors import UserError
from adaptive_platform.gradients.buckets import GradientBuckets
from adaptive_platform.optimizers import AdamPreconditioner
from adaptive_platform.recipe import Recipe
from adaptive_platform.statistics.throughput import StepTiming
from adaptive_platform.training.copies import Copies
from adaptive_platform.training.curvature import Curvature
from adaptive_platform.training.forecast import Forecast, forecast
from adaptive_platform.training.measured import Measured
from adaptive_platform.training.own_share import OwnShare
from adaptive_platform.training.state import RunState
from adaptive_platform.training.step import Step

__all__ = ["Measuring", "refuse_unmet_needs"]

_EVERY_LOOP = frozenset({"noise", "layers", "hessian", "throughput"})


def refuse_unmet_needs(recipe: Recipe, *, adversarial: bool) -> None:
    """Refuse a controller that this loop can't serve, before anything is built.

    Args:
        recipe: Names the controller.
        adversarial: The loop trains on `TrainingRun.with_adversaries`.

    Raises:
        UserError: Which need is not met, why, and what to do.
    """
    missing = recipe.batch.needs - _EVERY_LOOP
    if adversarial:
        missing -= {"adversarial"}
    if not missing:
        return
    if missing == {"adversarial"}:
        raise UserError(
            f"batch.kind = {recipe.batch.kind}: it needs adversarial examples, which are made "
            "between forward passes and so only in the library's own loop. Start the recipe with "
            "ap.train(...) or `adaptive-platform train`, or choose batch.kind=abs, which goes "
            "without them."
        )
    raise UserError(
        f"batch.kind = {recipe.batch.kind}: it needs {', '.join(sorted(missing))}, which this loop "
        f"does not measure; it measures {', '.join(sorted(_EVERY_LOOP))}. Choose another kind."
    )


class Measuring:
    """Feeds the state's estimators after each step, alike on all workers.

    Args:
        recipe: Says what is needed.
        state: Holds the estimators.
        membership: Says how workers are spread over nodes.
        reducer: For what can't ride along with the gradients.
        minimum: Smallest micro-batch of the model.
        share: Knows the largest micro-batch.
        curvature: Measures the Hessian, where that is needed.
        copies: Know the weights that all agree on, at which it is measured.
        preconditioner: What noise is measured through; plain gradients where None.
    """

    def __init__(
        self,
        recipe: Recipe,
        state: RunState,
        membership: Membership,
        reducer: Reducer,
        *,
        minimum: int,
        share: OwnShare,
        curvature: Curvature,
        copies: Copies,
        preconditioner: AdamPreconditioner | None,
    ) -> None:
        self._state = state
        self._reducer = reducer
        self._minimum = minimum
        self._share = share
        self._curvature = curvature
        self._copies = copies
        self._preconditioner = preconditioner
        self._num_nodes = len(set(membership.node_of_rank or ("one",)))
        self._needs = recipe.batch.needs
        self._range = recipe.workers if isinstance(recipe.workers, tuple) else None
        self._min_efficiency = recipe.membership.min_efficiency

    def noise(self, measured: Measured, step: Step, buckets: GradientBuckets) -> None:
        """Take a committed step's norms in; called before the optimizer reads the gradients."""
        state, moments = self._state, measured.moments
        if moments is None:
            return
        if moments.num_microbatches > 1 or state.estimator.has_unbiased:
            state.previous_gradient.forget()
            state.estimator.update(moments)
            return
        if state.variance is not None and state.variance.known:
            return  # gradients have been reduced by their noise on their way here
        difference = state.previous_gradient.difference(
            buckets,
            step.mean_factor,
            measured.trained,
            self._preconditioner if moments.preconditioned else None,
        )
        if difference is not None:
            state.estimator.update_differenced(difference)

    def speed(self, microbatch: int, accumulation: int, seconds: float) -> None:
        """Take the time of a committed step in."""
        self._state.speed.add(
            StepTiming(
                world_size=self._reducer.world_size,
                num_nodes=self._num_nodes,
                microbatch=microbatch,
                accumulation=accumulation,
                step_seconds=seconds,
            )
        )

    def refit(self, *, epoch_ended: bool) -> None:
        """Fit the speed of the run where it is needed and due. All workers take part."""
        speed = self._state.speed
        due = "throughput" in self._needs and speed.due(self._state.progress.step)
        if due or (epoch_ended and self._range is not None):
            speed.refit(self._reducer)

    def advice(self) -> WorkerAdvice | None:
        """How many workers the batch is worth; None where their number is fixed or not known."""
        model = self._state.speed.model
        if self._range is None or model is None:
            return None
        return advise_workers(
            model,
            self.limits(),
            global_batch=self._state.global_batch,
            workers=self._range,
            min_efficiency=self._min_efficiency,
        )

    def forecast(self, decision: Decision, observation: Observation) -> Forecast | None:
        """What a change of the batch should bring, for the record; None where nothing changes."""
        if not decision.changed:
            return None
        model = observation.throughput or self._state.speed.own_model()
        return forecast(observation, decision.global_batch, model)

    def curvature(self) -> None:
        """Measure the Hessian where it is needed; called at the end of each epoch."""
        if "hessian" in self._needs:
            with self._copies.agreed():
                self._state.hessian = self._curvature.top_eigenvalue(self._share.largest_microbatch)

    def limits(self) -> Limits:
        """What bounds the next batch."""
        return Limits(
            dataset_size=self._state.progress.dataset_size,
            world_size=self._reducer.world_size,
            smallest_microbatch=self._minimum,
            largest_microbatch=self._share.largest_microbatch,
            num_nodes=self._num_nodes,
        )

    def observation(self) -> Observation:
        """What the controller is told now."""
        state = self._state
        return Observation(
            progress=state.progress,
            summary=state.summary(),
            global_batch=state.global_batch,
            limits=self.limits(),
            throughput=state.speed.model,
        )
