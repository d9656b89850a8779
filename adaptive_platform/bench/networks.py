"""Networks by name for the planner, and a latency fitted to a published efficiency."""

from __future__ import annotations

import re
from collections.abc import Callable

from adaptive_platform.collectives import Link, Links
from adaptive_platform.errors import UserError

__all__ = ["NETWORKS", "fit_latency", "links_of_network", "read_row"]

_GBIT = 1e9 / 8
NETWORKS: dict[str, tuple[float, float]] = {
    "10gbe": (50e-6, 10 * _GBIT),
    "25gbe": (40e-6, 25 * _GBIT),
    "100gbe": (20e-6, 100 * _GBIT),
    "edr": (5e-6, 100 * _GBIT),
    "2xedr": (5e-6, 200 * _GBIT),
    "hdr": (5e-6, 200 * _GBIT),
}
"""Seconds of latency, which are rough guesses to be replaced by a measurement or a fit, and bytes
per second of one machine's card, which are its nominal rate."""
_LOCAL = Link(latency_seconds=5e-6, bytes_per_second=25e9)
"""Inside a machine: NVLink or a good PCIe switch."""
_LONGEST_LATENCY = 0.1
_HALVINGS = 30


def links_of_network(name: str) -> Links:
    """The links of a named network.

    Raises:
        UserError: There is no network of that name.
    """
    if name not in NETWORKS:
        raise UserError(f"--network = {name}: must be one of {', '.join(NETWORKS)}.")
    latency, rate = NETWORKS[name]
    return Links(remote=Link(latency_seconds=latency, bytes_per_second=rate), local=_LOCAL)


def read_row(words: str) -> tuple[int, tuple[int, int] | None, float]:
    """Workers, grid and efficiency of a published row, from `32x32:84.75%` or `1024:0.8475`.

    Raises:
        UserError: It does not have that form.
    """
    found = re.fullmatch(r"(\d+)(?:x(\d+))?:([\d.]+)(%?)", words.strip().lower())
    if found is None:
        raise UserError(
            f"--fit = {words}: write workers:efficiency or rows x row length:efficiency, such as "
            "32x32:84.75%."
        )
    grid = (int(found[1]), int(found[2])) if found[2] else None
    efficiency = float(found[3]) / (100 if found[4] else 1)
    if not 0 < efficiency < 1:
        raise UserError(f"--fit = {words}: the efficiency must be between 0 and 1 (or 100 %).")
    return (grid[0] * grid[1] if grid else int(found[1])), grid, efficiency


def fit_latency(links: Links, efficiency: float, efficiency_on: Callable[[Links], float]) -> Links:
    """The same bandwidths with the one latency that gives an efficiency.

    Args:
        links: Where to start.
        efficiency: To be met, in (0, 1).
        efficiency_on: What the model predicts on some links; falls as latency grows.

    Raises:
        UserError: No latency gives it, since bandwidth alone costs more already.
    """

    def with_latency(seconds: float) -> Links:
        local = links.local
        return Links(
            remote=links.remote.model_copy(update={"latency_seconds": seconds}),
            local=local and local.model_copy(update={"latency_seconds": seconds}),
        )

    best = efficiency_on(with_latency(0.0))
    if best < efficiency:
        raise UserError(
            f"--fit: without any latency the model gives {best:.1%}, which is below the published "
            f"{efficiency:.1%}. Give a faster network, or a longer step."
        )
    low, high = 0.0, _LONGEST_LATENCY
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if efficiency_on(with_latency(middle)) > efficiency:
            low = middle
        else:
            high = middle
    return with_latency(high)
