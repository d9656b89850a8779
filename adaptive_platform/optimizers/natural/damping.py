"""How much damping: split over two factors, moved with the batch, warmed up."""

from __future__ import annotations

import math

__all__ = ["damping_at_batch", "split_damping", "warmed_damping"]


def split_damping(damping: float, input_mean: float, output_mean: float) -> tuple[float, float]:
    """What to add to the diagonals of A and G; the two always multiply to `damping`.

    `pi = sqrt(mean diagonal of A / mean diagonal of G)` (Martens & Grosse 2015, section 6.3):
    `pi sqrt(lam)` for A, `sqrt(lam) / pi` for G. A dead factor gets pi = 1.

    Args:
        damping: lam, > 0.
        input_mean: `tr A / dim A`.
        output_mean: `tr G / dim G`.
    """
    pi = math.sqrt(input_mean / output_mean) if input_mean > 0 and output_mean > 0 else 1.0
    if not math.isfinite(pi) or pi == 0.0:
        pi = 1.0
    root = math.sqrt(damping)
    return pi * root, root / pi


def damping_at_batch(damping: float, batch: float, reference: float, power: float) -> float:
    """`lam (reference / batch)^power`: larger batches have less noise to damp.

    The published settings fall with the square root, from 2e-4 at 32,768 to 1e-4 at 131,072.
    """
    return damping * float((reference / batch) ** power)


def warmed_damping(target: float, first: float, steps: int, step: int) -> float:
    """Damping that falls from `first` to `target` (early versions of arXiv 1811.12019, as LBANN).

    `lam <- (1 - a) lam + a target` per step with `a = 2 log10(first / target) / steps`.

    Args:
        target: Damping after the warm-up.
        first: Damping at step 0; >= target.
        steps: Length of the warm-up; 0 for none.
        step: Committed steps so far.
    """
    if steps <= 0 or first <= target:
        return target
    share = min(2.0 * math.log10(first / target) / steps, 1.0)
    return target + (first - target) * float((1.0 - share) ** step)
