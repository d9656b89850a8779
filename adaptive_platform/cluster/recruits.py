"""Workers beside Ray Train's: replacements and growth, started by the driver as plain actors."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from adaptive_platform.cluster.membership import MembershipStatus
from adaptive_platform.cluster.roster import Verdict
from adaptive_platform.cluster.vacancies import room_outside, vacancies, vacant_places

__all__ = ["RecruitWorker", "Recruiter"]

_LOOK_SECONDS = 1.0
_FIRST_PAUSE_SECONDS = 2.0
_LONGEST_PAUSE_SECONDS = 60.0
_END_SECONDS = 20.0


class RecruitWorker:
    """Actor that runs one worker; a second thread of it answers whether it lives."""

    def __init__(self) -> None:
        from adaptive_platform.cluster.backend import prepare_worker

        prepare_worker()

    def run(self, job: bytes, attempt: str, name: str) -> None:
        """Train until the run is over or this worker leaves."""
        from ray import cloudpickle

        from adaptive_platform.cluster.worker import Recruitment, train_worker

        recruited = Recruitment(attempt=attempt, name=name)
        train_worker(cloudpickle.loads(job), time.time(), recruited)


@dataclass(slots=True)
class _Recruit:
    name: str
    attempt: str
    actor: Any
    done: Any
    inside: bool
    ready: Any
    """Comes once its process lives."""
    was_member: bool = False


class Recruiter:
    """Keeps a run at its largest number of workers, as far as the cluster has room.

    Args:
        mailbox: The actor with the list of workers.
        job: What recruits do, pickled.
        resources: Of one worker, such as `{"CPU": 1}`.
        say: Tells people.
    """

    def __init__(
        self,
        mailbox: Any,
        job: bytes,
        resources: dict[str, float],
        say: Callable[[str], None],
    ) -> None:
        self._mailbox = mailbox
        self._job = job
        self._resources = resources
        self._say = say
        self._recruits: list[_Recruit] = []
        self._looked_at = 0.0
        self._pause = _FIRST_PAUSE_SECONDS
        self._not_before = 0.0
        self._told = ""

    def look(self) -> MembershipStatus | None:
        """Start what is missing; called a few times a second.

        Returns:
            Who is there, about once a second.
        """
        now = time.monotonic()
        if now - self._looked_at < _LOOK_SECONDS:
            return None
        self._looked_at = now
        try:
            status: MembershipStatus = ray.get(self._mailbox.status.remote(), timeout=10.0)
        except ray.exceptions.RayError:
            return None
        self._bury(status)
        with suppress(ray.exceptions.RayError):
            draining = set(ray._private.state.state.get_draining_nodes())
            if draining:
                self._mailbox.drain.remote(draining)
            if Verdict(status.verdict) is Verdict.GO_ON and now >= self._not_before:
                self._start(status, draining)
        return status

    def close(self) -> None:
        """Let recruits come to their end, then end their actors."""
        deadline = time.monotonic() + _END_SECONDS
        for recruit in self._recruits:
            with suppress(ray.exceptions.RayError):
                ray.wait([recruit.done], timeout=max(deadline - time.monotonic(), 0.0))
            ray.kill(recruit.actor)
        self._recruits = []

    def _bury(self, status: MembershipStatus) -> None:
        """Forget recruits that ended, and end those of an earlier attempt."""
        staying, failed = [], False
        for recruit in self._recruits:
            recruit.was_member |= recruit.name in status.present
            ended, _ = ray.wait([recruit.done], timeout=0)
            if recruit.attempt != status.attempt and not ended:
                ray.kill(recruit.actor)
            elif not ended:
                staying.append(recruit)
            elif self._has_failed(recruit):
                # One that only waits is asked by nobody else whether it lives.
                self._mailbox.lose.remote(recruit.attempt, recruit.name, "its process ended")
                failed |= not recruit.was_member
        self._recruits = staying
        if any(recruit.was_member for recruit in staying):
            self._pause = _FIRST_PAUSE_SECONDS
        if failed:  # one reason, however many it took along
            self._not_before = time.monotonic() + self._pause
            self._pause = min(2.0 * self._pause, _LONGEST_PAUSE_SECONDS)

    def _has_failed(self, recruit: _Recruit) -> bool:
        """How one that ended came to its end."""
        error: ray.exceptions.RayError | None = None
        try:
            ray.get(recruit.done)
        except ray.exceptions.RayError as raised:
            error = raised
            line = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            if line != self._told:
                self._told = line
                self._say(f"a worker that joined later ended: {line}")
        ray.kill(recruit.actor)
        return error is not None

    def _start(self, status: MembershipStatus, draining: set[str]) -> None:
        vacant = self._vacant(status, draining)
        coming = [r for r in self._recruits if r.name not in status.present]
        others = set(status.waiting) - {r.name for r in coming}
        inside, outside = vacancies(
            wanted=status.wanted,
            present=len(status.present),
            coming=len(coming) + len(others),
            vacant=vacant,
            free=room_outside(
                ray._private.state.available_resources_per_node(), self._resources, draining
            ),
        )
        for number in range(inside + outside):
            self._recruit(status, inside=number < inside)

    def _vacant(self, status: MembershipStatus, draining: set[str]) -> int:
        """Places in Ray Train's group for which nobody has been started.

        Ends recruits that wait for a place there and can't get one: it is gone, or its machine is
        about to go. One that lives already has its place, and goes on making itself ready.
        """
        node_of = dict(zip(status.present, status.nodes, strict=True))
        inside = [r for r in self._recruits if r.inside]
        occupants = [node_of[r.name] for r in inside if r.name in node_of]
        bundles = _bundles(status.placement_group)
        vacant = vacant_places(bundles, (*status.housed, *occupants), draining)
        hopeful = []
        for recruit in [r for r in inside if r.name not in node_of]:
            living, _ = ray.wait([recruit.ready], timeout=0)
            if living or recruit.name in status.waiting:
                vacant -= 1
            else:
                hopeful.append(recruit)
        for recruit in hopeful:
            if vacant > 0:
                vacant -= 1
            else:
                ray.kill(recruit.actor)
                self._recruits.remove(recruit)
        return max(vacant, 0)

    def _recruit(self, status: MembershipStatus, *, inside: bool) -> None:
        name = f"{status.attempt}/recruit-{uuid.uuid4().hex[:6]}"
        options: dict[str, Any] = {
            "num_cpus": self._resources.get("CPU", 0),
            "num_gpus": self._resources.get("GPU", 0),
            "max_concurrency": 2,
            "max_restarts": 0,
        }
        if inside:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                status.placement_group, placement_group_capture_child_tasks=False
            )
        actor = ray.remote(RecruitWorker).options(**options).remote()
        done = actor.run.remote(self._job, status.attempt, name)
        ready = actor.__ray_ready__.remote()
        self._recruits.append(_Recruit(name, status.attempt, actor, done, inside, ready))


def _bundles(group: Any) -> tuple[str, ...]:
    """Machine of each place in a group; none while Ray looks for a node in the place of a dead one.

    An actor that is to live in such a group keeps Ray's head busy with vain attempts to start it,
    at the cost of everyone who trains there.
    """
    if group is None:
        return ()
    with suppress(ray.exceptions.RayError, ValueError):
        table = ray.util.placement_group_table(group)
        if table.get("state") == "CREATED":
            return tuple(table["bundles_to_node_id"].values())
    return ()
