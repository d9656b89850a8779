"""What every reduction plan would make of a training run on a cluster that need not exist."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from adaptive_platform.bench.model_profile import Bucket, buckets_of, layer_costs
from adaptive_platform.bench.networks import fit_latency, read_row
from adaptive_platform.bench.plans import PlanRow, Step, price_plans
from adaptive_platform.collectives import Links
from adaptive_platform.errors import UserError

__all__ = ["Question", "answer"]

IMAGES_PER_SECOND = {"resnet50": 2565 / 4}
"""Training speed of one worker where none is given: a V100 in mixed precision, from four of them
(Mikami et al. 2018, arXiv 1811.05233, baseline of the efficiencies)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is to be planned."""

    workers: tuple[int, ...]
    links: Links
    model: str = ""
    """Name of a model; without one `message_bytes` is reduced in equal buckets."""
    image_size: int = 224
    message_bytes: float = 0.0
    element_bytes: float = 4.0
    """Bytes of one gradient number on the wire."""
    bucket_bytes: float = 25 * 2**20
    grid: tuple[int, int] | None = None
    workers_per_node: int = 1
    batch: int = 32
    """Samples of one worker and step."""
    images_per_second: float | None = None
    """Forward and backward of one worker."""
    compute_seconds: float | None = None
    """Of one step, in the place of batch and speed."""
    samples: float = 1_281_167.0
    """Of the training set."""
    epochs: float = 90.0
    fit: str = ""
    """A published efficiency that the latency is fitted to first, such as `32x32:84.75%`."""


def answer(question: Question) -> tuple[list[PlanRow], Links]:
    """Price all plans for all numbers of workers.

    Returns:
        Rows, cheapest first for each number of workers, and the links they are for, which a fit
        has changed.

    Raises:
        UserError: Something does not fit together.
    """
    buckets: tuple[Bucket, ...] = ()
    message_bytes = question.message_bytes
    if question.model:
        layers = layer_costs(question.model, question.image_size)
        buckets = tuple(buckets_of(layers, question.element_bytes, question.bucket_bytes))
        message_bytes = sum(bucket.bytes for bucket in buckets)
    step = _step(question, buckets)
    links = question.links
    if question.fit:
        links = _fitted(question, links, message_bytes, step)
    rows = [
        row
        for count in question.workers
        for row in price_plans(
            count,
            links,
            message_bytes,
            workers_per_node=question.workers_per_node,
            grid=question.grid if len(question.workers) == 1 else None,
            step=step,
        )
    ]
    return rows, links


def _step(question: Question, buckets: tuple[Bucket, ...]) -> Step | None:
    seconds = question.compute_seconds
    if seconds is None:
        speed = question.images_per_second or IMAGES_PER_SECOND.get(question.model)
        if speed is None:
            if question.model or question.fit:
                raise UserError(
                    "--images-per-second is missing: how fast one worker trains "
                    f"{question.model or 'the model'} alone; or give --compute-seconds of a step."
                )
            return None
        if speed <= 0 or question.batch < 1:
            raise UserError("--images-per-second and --batch: must be above 0.")
        seconds = question.batch / speed
    if seconds <= 0:
        raise UserError(f"--compute-seconds = {seconds:g}: must be above 0.")
    return Step(
        compute_seconds=seconds,
        bucket_bytes=question.bucket_bytes,
        buckets=buckets,
        samples_to_go=question.samples * question.epochs if question.model else None,
        samples_per_worker=question.batch,
    )


def _fitted(question: Question, links: Links, message_bytes: float, step: Step | None) -> Links:
    workers, grid, efficiency = read_row(question.fit)
    assert step is not None

    def of_torus(tried: Links) -> float:
        rows: Sequence[PlanRow] = price_plans(
            workers,
            tried,
            message_bytes,
            workers_per_node=question.workers_per_node,
            grid=grid,
            step=replace(step, samples_to_go=None),
            kinds=("torus",),
        )
        found = rows[0].efficiency
        assert found is not None
        return found

    return fit_latency(links, efficiency, of_torus)
