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

__all__ = ["RecruitWorker", "Recruiter", "vacancies"]

_LOOK_SECONDS = 1.0
_FIRST_PAUSE_SECONDS = 2.0
_LONGEST_PAUSE_SECONDS = 60.0
_END_SECONDS = 20.0


def vacancies(
    *, wanted: int, present: int, coming: int, vacant: int, coming_inside: int, free: int
) -> tuple[int, int]:
    """How many recruits to start inside Ray Train's placement group, and outside of it.

    Args:
        wanted: Most workers.
        present: Members now.
        coming: Recruits that are under way.
        vacant: Places in the placement group whose worker is gone.
        coming_inside: Recruits that live in such a place, members or not.
        free: Workers that the cluster has room for outside of the group.
    """
    missing = max(wanted - present - coming, 0)
    inside = min(missing, max(vacant - coming_inside, 0))
    return inside, min(missing - inside, free)


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
            self._start(status)
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
        staying = []
        for recruit in self._recruits:
            ended, _ = ray.wait([recruit.done], timeout=0)
            if recruit.attempt != status.attempt and not ended:
                ray.kill(recruit.actor)
            elif not ended:
                staying.append(recruit)
            else:
                self._learn_from(recruit)
        self._recruits = staying
        if any(r.name in status.present for r in staying):
            self._pause = _FIRST_PAUSE_SECONDS

    def _learn_from(self, recruit: _Recruit) -> None:
        try:
            ray.get(recruit.done)
        except ray.exceptions.RayError as error:
            self._not_before = time.monotonic() + self._pause
            self._pause = min(2.0 * self._pause, _LONGEST_PAUSE_SECONDS)
            line = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            if line != self._told:
                self._told = line
                self._say(f"a worker that joined later ended: {line}")
        ray.kill(recruit.actor)

    def _start(self, status: MembershipStatus) -> None:
        known = {*status.present, *status.waiting}
        placed = _is_placed(status.placement_group)
        if not placed:
            self._withdraw(known)
        coming = [r for r in self._recruits if r.name not in status.present]
        if len(known) + len([r for r in coming if r.name not in known]) >= status.wanted:
            return
        free = ray.available_resources()
        room = min(int(free.get(name, 0.0) // need) for name, need in self._resources.items())
        inside, outside = vacancies(
            wanted=status.wanted,
            present=len(status.present),
            coming=len(coming),
            vacant=status.vacant if placed else 0,
            coming_inside=sum(r.inside for r in self._recruits),
            free=room,
        )
        for number in range(inside + outside):
            self._recruit(status, inside=number < inside)

    def _withdraw(self, known: set[str]) -> None:
        """End recruits that wait for a place in a group that has none for them.

        One that lives already has its place, and goes on making itself ready.
        """
        for recruit in [r for r in self._recruits if r.inside and r.name not in known]:
            living, _ = ray.wait([recruit.ready], timeout=0)
            if not living:
                ray.kill(recruit.actor)
                self._recruits.remove(recruit)

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


def _is_placed(group: Any) -> bool:
    """False while Ray looks for a node in the place of one that died.

    An actor that is to live in such a group keeps Ray's head busy with vain attempts to start it,
    at the cost of everyone who trains there.
    """
    if group is None:
        return False
    with suppress(ray.exceptions.RayError, ValueError):
        return bool(ray.util.placement_group_table(group).get("state") == "CREATED")
    return False
