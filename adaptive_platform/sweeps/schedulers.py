"""Which trials go on: all, the better part at each rung, those above the median, or a population.

Time is the share of its run that a trial has behind it, in percent, so that trials with other
batches or lengths are compared at like places.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field

from adaptive_platform.settings import Variant, union_of
from adaptive_platform.sweeps.space import Choice, Dimension

__all__ = ["AnyScheduler", "Asha", "Median", "NoScheduler", "Pbt", "Scheduler"]

_TIME = "percent"

Percent = Annotated[float, Field(gt=0, lt=100)]


class Scheduler(Variant):
    """Stops trials early, or moves them."""

    @abstractmethod
    def build(
        self, metric: str, mode: str, space: Mapping[str, Dimension], seed: int
    ) -> Any | None:
        """Tune's scheduler; None where every trial runs to its end."""

    def problem(self, space: Mapping[str, Dimension]) -> str:
        """Why it can't work on this space; empty where it can."""
        return ""


class NoScheduler(Scheduler):
    """Every trial runs to its end."""

    kind: Literal["none"] = "none"

    def build(self, metric: str, mode: str, space: Mapping[str, Dimension], seed: int) -> None:
        """See `Scheduler.build`."""
        return


class Asha(Scheduler):
    """Asynchronous successive halving (arXiv 1810.05934): at each rung the best part goes on."""

    kind: Literal["asha"] = "asha"
    grace_percent: Percent = 20.0
    """Share of the run, in percent, before which no trial is stopped: the lowest rung."""
    reduction_factor: Annotated[float, Field(gt=1)] = 3.0
    """One trial in this many goes on beyond a rung; rungs lie this factor apart."""

    def build(self, metric: str, mode: str, space: Mapping[str, Dimension], seed: int) -> Any:
        """See `Scheduler.build`."""
        from ray.tune.schedulers import AsyncHyperBandScheduler

        return AsyncHyperBandScheduler(
            time_attr=_TIME,
            metric=metric,
            mode=mode,
            max_t=101,  # beyond the end: what comes that far ends by itself
            grace_period=self.grace_percent,
            reduction_factor=self.reduction_factor,
            stop_last_trials=False,
        )


class Median(Scheduler):
    """Median stopping (Golovin et al., Vizier, section 3.3.2).

    A trial stops when the best it has reached is worse than the median of the others' averages at
    the same place.
    """

    kind: Literal["median"] = "median"
    grace_percent: Percent = 30.0
    """Share of the run, in percent, before which no trial is stopped."""
    min_trials: Annotated[int, Field(ge=2)] = 3
    """Trials that the median is taken over, at least."""

    def build(self, metric: str, mode: str, space: Mapping[str, Dimension], seed: int) -> Any:
        """See `Scheduler.build`."""
        from ray.tune.schedulers import MedianStoppingRule

        return MedianStoppingRule(
            time_attr=_TIME,
            metric=metric,
            mode=mode,
            grace_period=self.grace_percent,
            min_samples_required=self.min_trials,
        )


class Pbt(Scheduler):
    """Population-based training (arXiv 1711.09846): weak trials go on from a strong one's weights.

    They also take over its fields, of which those in `moves` are changed a little or drawn anew. A
    trial that takes over resumes from the other's newest checkpoint, so learning rate and fixed
    batch may move within a run.
    """

    kind: Literal["pbt"] = "pbt"
    every_percent: Percent = 25.0
    """Share of the run, in percent, between two looks at the population."""
    moves: Annotated[tuple[str, ...], Field(min_length=1)]
    """Fields of the space that may move, such as `optimizer.lr` or `batch.global_batch`."""
    quantile: Annotated[float, Field(gt=0, le=0.5)] = 0.25
    """Share of the trials that take over, and of those that they take from."""
    resample: Annotated[float, Field(ge=0, le=1)] = 0.25
    """Chance that a field is drawn anew; otherwise it moves by a factor of 1.2 or 0.8, or to a
    neighbouring choice."""

    def build(self, metric: str, mode: str, space: Mapping[str, Dimension], seed: int) -> Any:
        """See `Scheduler.build`."""
        from ray.tune.schedulers import PopulationBasedTraining

        return PopulationBasedTraining(
            time_attr=_TIME,
            metric=metric,
            mode=mode,
            perturbation_interval=self.every_percent,
            hyperparam_mutations={"fields": {name: _domain(space[name]) for name in self.moves}},
            quantile_fraction=self.quantile,
            resample_probability=self.resample,
            custom_explore_fn=partial(_bounded, {name: space[name] for name in self.moves}),
            log_config=False,
        )

    def problem(self, space: Mapping[str, Dimension]) -> str:
        """See `Scheduler.problem`."""
        for name in self.moves:
            if name not in space:
                return (
                    f"scheduler.moves = {name}: it is no field of the space ({', '.join(space)}); "
                    "name one of these."
                )
            if space[name].when or name.endswith(".kind"):
                return (
                    f"scheduler.moves = {name}: a running trial can't change which parts it is "
                    "made of; name a field that is always drawn and is no kind."
                )
        return ""


AnyScheduler = union_of(Scheduler)  # type: ignore[type-abstract]


def _domain(dimension: Dimension) -> Any:
    """The dimension as Tune's domain, or as a list for choices."""
    from ray import tune

    if isinstance(dimension, Choice):
        return list(dimension.values)
    low, high = getattr(dimension, "low"), getattr(dimension, "high")  # noqa: B009
    if dimension.kind == "int":
        log = getattr(dimension, "log")  # noqa: B009
        return tune.lograndint(low, high + 1) if log else tune.randint(low, high + 1)
    return (
        tune.loguniform(low, high) if dimension.kind == "log_uniform" else tune.uniform(low, high)
    )


def _bounded(space: Mapping[str, Dimension], config: dict[str, Any]) -> dict[str, Any]:
    """A factor of 1.2 may leave the space; the nearest value inside is taken."""
    fields = dict(config["fields"])
    for name, dimension in space.items():
        fields[name] = dimension.inside(fields[name])
    return {**config, "fields": fields}
