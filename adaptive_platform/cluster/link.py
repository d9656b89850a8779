"""A worker's side of live membership: stops, waits for the next list, and meets the others."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ray
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import DistError

from adaptive_platform.cluster.membership import Assignment, Member
from adaptive_platform.cluster.rendezvous import connect_store, serve_store
from adaptive_platform.cluster.roster import Verdict
from adaptive_platform.collectives import CollectiveError, Membership
from adaptive_platform.errors import RunFailedError
from adaptive_platform.training.regrouping import NextMembers

__all__ = ["MembershipLink"]


_PATIENCE_SECONDS = 60.0
_MEETINGS = 3
"""So many lists whose first worker is out of reach, and this one takes itself for cut off."""


class MembershipLink:
    """Implements `training.regrouping.Regrouping` with the mailbox's list of workers.

    Args:
        mailbox: The actor.
        attempt: Which attempt of Ray Train this worker belongs to.
        name: Of this worker, unique within the run.
        timeout_seconds: Of operations between workers: a peer that lives notices within it.
        changing: The generation that is to change, as far as the first worker heard; None for none.
        joining: This worker is not a member yet; its first `next` waits until there is room.
    """

    def __init__(
        self,
        mailbox: Any,
        attempt: str,
        name: str,
        *,
        timeout_seconds: float,
        changing: Callable[[], int | None],
        joining: bool,
    ) -> None:
        self._mailbox = mailbox
        self._attempt = attempt
        self._name = name
        self._timeout_seconds = timeout_seconds
        self._changing = changing
        self._number = 0
        self._rank, self._world_size = 0, 1
        self._joining = joining
        context = ray.get_runtime_context()
        self._node = context.get_node_id()
        self._actor = context.current_actor
        self._group = ray.util.get_current_placement_group()
        self._host = ray.util.get_node_ip_address()
        self.cut_off = False
        """True once the list of workers was out of reach: nobody counts on this one any more."""
        self._why = ""
        # One for all generations, each under a prefix of its own: its port says that we live.
        self._served = serve_store(self._host, timeout_seconds)

    def enroll(self, rank: int, world_size: int) -> None:
        """Say that this worker of Ray Train is there."""
        enrolled = self._mailbox.enroll.remote(self._attempt, rank, world_size, self._member())
        ray.get(enrolled)
        self._rank, self._world_size = rank, world_size

    def change_wanted(self) -> bool:
        """See `Regrouping.change_wanted`."""
        return self._changing() == self._number

    def next(self, failure: CollectiveError | None) -> NextMembers | None:
        """See `Regrouping.next`."""
        found = self._meet()
        if isinstance(found, NextMembers):
            self._joining = False
            self._number = found.membership.generation
            return found
        if found is None or self._joining:
            return None
        if failure is not None and found is Verdict.RESTART:
            raise failure
        raise RunFailedError(
            "workers were lost more often without a committed step in between than max_failures "
            f"allows; the last one: {self._why or failure}"
        )

    def lose(self, why: str) -> bool:
        """Say that this worker ends, and why; True where others go on without it."""
        with suppress(ray.exceptions.RayError):
            ray.get(self._mailbox.lose.remote(self._attempt, self._name, why), timeout=10.0)
            found = ray.get(self._mailbox.verdict.remote(), timeout=10.0)
            return Verdict(found) is Verdict.GO_ON
        return False

    def wait_for_end(self) -> None:
        """Return when the run is over for all workers."""
        with suppress(ray.exceptions.RayError):
            while Verdict(ray.get(self._mailbox.verdict.remote())) is Verdict.GO_ON:
                time.sleep(1.0)

    def finish(self) -> None:
        """Say that this worker came to the end of the run."""
        with suppress(ray.exceptions.RayError):
            ray.get(self._mailbox.finish.remote(self._attempt, self._name), timeout=10.0)

    def _meet(self) -> NextMembers | Verdict | None:
        """The first one of a new list may be lost before the others reach it: ask again then."""
        joining = self._joining
        for _ in range(_MEETINGS):
            try:
                return self._ask(joining)
            except CollectiveError as error:
                if self.cut_off:
                    raise
                unreachable, joining = error, False  # it has a place now
        raise unreachable

    def _ask(self, joining: bool) -> NextMembers | Verdict | None:
        answer = self._mailbox.next.remote(self._attempt, self._member(), joining)
        # Peers that live notice within their limit; for a free place one may wait for ever.
        limit = None if joining else self._timeout_seconds + _PATIENCE_SECONDS
        began = time.monotonic()
        try:
            found: Assignment = ray.get(answer, timeout=limit)
        except ray.exceptions.RayError as error:
            self.cut_off = True  # whoever is left goes on without this worker
            raise CollectiveError(
                operation="ask for the list of workers",
                group="world",
                rank=self._rank,
                world_size=self._world_size,
                generation=self._number,
                timeout_seconds=limit or 0.0,
                after_seconds=time.monotonic() - began,
                reason=f"{type(error).__name__}: the driver's node is out of reach, or another "
                "worker did not stop",
            ) from None
        verdict, self._why = Verdict(found.verdict), found.why
        if verdict is Verdict.OVER or (verdict is Verdict.GO_ON and found.rank is None):
            return None
        if found.rank is None:
            return verdict
        self._rank, self._world_size = found.rank, len(found.nodes)
        return NextMembers(
            membership=Membership(
                store=PrefixStore(f"generation {found.number}", self._store(found)),
                rank=found.rank,
                world_size=len(found.nodes),
                generation=found.number,
                node_of_rank=found.nodes,
            ),
            lost=found.lost,
            joined=found.joined,
            left=found.left,
        )

    def _store(self, found: Assignment) -> Store:
        if found.rank == 0:
            return self._served
        assert found.rank is not None
        began = time.monotonic()
        try:
            return connect_store(*found.address, self._timeout_seconds)
        except (DistError, RuntimeError) as error:
            raise CollectiveError(
                operation="rendezvous",
                group="world",
                rank=found.rank,
                world_size=len(found.nodes),
                generation=found.number,
                timeout_seconds=self._timeout_seconds,
                after_seconds=time.monotonic() - began,
                peers=(0,),
                reason=str(error),
            ) from None

    def _member(self) -> Member:
        return Member(
            name=self._name,
            node=self._node,
            actor=self._actor,
            pid=os.getpid(),
            address=(self._host, self._served.port),
            placement_group=self._group,
        )
