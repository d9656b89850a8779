"""How many more workers to start, and where there is room for them; pure decisions without Ray."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

__all__ = ["room_outside", "vacancies", "vacant_places"]


def vacancies(*, wanted: int, present: int, coming: int, vacant: int, free: int) -> tuple[int, int]:
    """How many recruits to start inside Ray Train's placement group, and outside of it.

    Args:
        wanted: Most workers.
        present: Members now.
        coming: Recruits that are under way.
        vacant: Places in the placement group that nobody holds or waits for.
        free: Workers that the cluster has room for outside of the group.
    """
    missing = max(wanted - present - coming, 0)
    inside = min(missing, vacant)
    return inside, min(missing - inside, free)


def vacant_places(
    bundles: Sequence[str], occupants: Sequence[str], draining: Collection[str]
) -> int:
    """Places of a placement group that a new worker can get.

    Ray starts nothing on a machine that is about to go, though the group still has places there.

    Args:
        bundles: Machine of each place.
        occupants: Machine of each worker that lives in one of them, at work or not.
        draining: Machines that will be taken away.
    """
    places = Counter(node for node in bundles if node not in draining)
    taken = Counter(occupants)
    return sum(max(number - taken[node], 0) for node, number in places.items())


def room_outside(
    free: Mapping[str, Mapping[str, float]], need: Mapping[str, float], draining: Collection[str]
) -> int:
    """Workers that fit beside all that runs; what is left of two machines makes no place.

    Args:
        free: By machine, how much of each resource nobody holds.
        need: Of one worker, such as `{"CPU": 1.0}`.
        draining: Machines that will be taken away.
    """
    wanted = {name: amount for name, amount in need.items() if amount > 0.0}
    return sum(
        min((int(has.get(name, 0.0) // amount) for name, amount in wanted.items()), default=0)
        for node, has in free.items()
        if node not in draining
    )
