"""The desk that keeps the list of workers, with actors that answer, are dead, or stay silent."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
import ray

from adaptive_platform.cluster import membership
from adaptive_platform.cluster.membership import Member, MembershipDesk


class Actor:
    """Answers Ray's question whether it lives as it is told to."""

    def __init__(self, state: str = "alive") -> None:
        self.state = state
        self.__ray_ready__ = SimpleNamespace(remote=self._answer)

    async def _answer(self) -> None:
        if self.state == "dead":
            raise ray.exceptions.RayActorError
        if self.state == "silent":
            await asyncio.sleep(60)


def desk_of(*states: str, most: int = 4) -> tuple[MembershipDesk, list[Member]]:
    desk = MembershipDesk(most, 9)
    members = [
        Member(
            name=f"w{rank}", node=f"node{rank}", actor=Actor(state), address=("127.0.0.1", 1 + rank)
        )
        for rank, state in enumerate(states)
    ]
    for rank, member in enumerate(members):
        desk.enroll("one", rank, len(members), member)
    return desk, members


def test_a_dead_member_is_not_waited_for_and_holds_no_place():
    async def scene() -> None:
        desk, (a, _, c) = desk_of("alive", "dead", "alive")
        found = await asyncio.gather(
            desk.next("one", a, join=False), desk.next("one", c, join=False)
        )
        assert [f.rank for f in found] == [0, 1]
        assert {f.number for f in found} == {1}
        assert found[0].address == ("127.0.0.1", 1)
        assert found[0].nodes == ("node0", "node2")
        assert found[0].lost == ("worker 1 (its process or node ended)",)
        status = desk.status()
        assert (status.housed, status.present) == (("node0", "node2"), ("w0", "w2"))

    asyncio.run(scene())


@pytest.mark.parametrize("gone", ["lost", "left"])
def test_one_that_is_no_member_any_more_holds_its_place_until_its_process_ends(gone):
    async def scene() -> None:
        desk, members = desk_of("alive", "alive")
        if gone == "lost":
            desk.lose("one", "w1", "ValueError: no")
        else:
            desk.want(1)
            await asyncio.gather(*(desk.next("one", m, join=False) for m in members))
        assert desk.status().present == ("w0",)
        await asyncio.sleep(0.1)
        assert desk.status().housed == ("node0", "node1")
        await asyncio.sleep(0.1)  # the last look is over
        members[1].actor.state = "dead"
        desk.status()
        await asyncio.sleep(0.1)
        assert desk.status().housed == ("node0",)

    asyncio.run(scene())


def test_one_that_stopped_and_died_is_not_on_the_next_list():
    """A node's processes end one after the other; the last one has time to ask for its place."""

    async def scene() -> None:
        desk, (a, b, c, _) = desk_of("alive", "alive", "alive", "dead")
        first = asyncio.create_task(desk.next("one", a, join=False))
        await asyncio.sleep(0)
        a.actor.state = "dead"  # first, and where the others would have met
        found = await asyncio.gather(
            desk.next("one", b, join=False), desk.next("one", c, join=False)
        )
        assert [f.rank for f in found] == [0, 1]
        assert found[0].address == ("127.0.0.1", 2)
        assert len(found[0].lost) == 2
        assert (await first).rank is None

    asyncio.run(scene())


def test_a_port_that_closed_tells_of_a_process_before_ray_does():
    async def scene() -> None:
        async def greet(_, writer) -> None:
            writer.close()

        desk = MembershipDesk(4, 9)
        server = await asyncio.start_server(greet, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        gone = Member(name="w0", node="n", actor=Actor("silent"), address=("127.0.0.1", port))
        shut = Member(name="w1", node="n", actor=Actor("alive"), address=("127.0.0.1", 1))
        desk.enroll("one", 0, 2, gone)
        desk.enroll("one", 1, 2, shut)
        await asyncio.sleep(0.2)
        server.close()
        await server.wait_closed()
        found = await asyncio.wait_for(desk.next("one", shut, join=False), 3.0)
        assert found.lost == ("worker 0 (its process or node ended)",)
        assert found.rank == 0, "a port that never was open means nothing"

    asyncio.run(scene())


def test_a_living_member_is_waited_for_and_a_silent_one_only_for_a_while(monkeypatch):
    monkeypatch.setattr(membership, "_SILENT_SECONDS", 0.5)

    async def scene() -> None:
        desk, (a, b, c) = desk_of("alive", "alive", "silent")
        first = asyncio.create_task(desk.next("one", a, join=False))
        await asyncio.sleep(2.5)
        assert not first.done(), "b lives and has not come to its end yet"
        second = await desk.next("one", b, join=False)
        assert (await first).rank == 0
        assert second.nodes == ("node0", "node1")
        c.actor.state = "alive"  # it wakes up, and waits for the next change
        third = asyncio.create_task(desk.next("one", c, join=False))
        await asyncio.sleep(0.1)
        assert desk.roster.change_wanted
        found = await asyncio.gather(
            desk.next("one", a, join=False), desk.next("one", b, join=False), third
        )
        assert [f.rank for f in found] == [0, 1, 2]
        assert found[0].joined == 1

    asyncio.run(scene())


def test_workers_of_another_attempt_and_of_an_ended_run_are_sent_away():
    async def scene() -> None:
        desk, (a, b) = desk_of("alive", "alive")
        assert (await desk.next("two", a, join=True)).verdict == "over"
        waiting = asyncio.create_task(desk.next("one", a, join=False))
        await asyncio.sleep(0)
        desk.end()
        assert (await waiting).verdict == "over"
        assert (await desk.next("one", b, join=False)).verdict == "over"
        assert await desk.verdict() == "over"

    asyncio.run(scene())


def test_the_verdict_knows_of_deaths_that_nobody_reported():
    async def scene() -> None:
        desk, members = desk_of("dead")
        assert await desk.verdict() == "restart"
        desk, members = desk_of("alive", "dead")
        assert await desk.verdict() == "go on"
        members[0].actor.state = "dead"
        assert await desk.verdict() == "restart"

    asyncio.run(scene())


def test_an_attempt_begins_only_with_its_last_worker():
    async def scene() -> None:
        desk = MembershipDesk(4, 9)
        desk.enroll("one", 0, 2, Member(name="w0", node="n", actor=Actor()))
        assert await desk.verdict() == "restart"
        desk.enroll("one", 1, 2, Member(name="w1", node="n", actor=Actor()))
        assert await desk.verdict() == "go on"

    asyncio.run(scene())


@pytest.mark.parametrize(("wanted", "leaving"), [(2, ["w2"]), (4, [])])
def test_an_advised_number_makes_the_last_ones_leave(wanted, leaving):
    async def scene() -> None:
        desk, members = desk_of("alive", "alive", "alive")
        desk.want(wanted)
        assert desk.status().wanted == wanted
        assert desk.roster.change_wanted == bool(leaving)
        if leaving:
            found = await asyncio.gather(*(desk.next("one", m, join=False) for m in members))
            assert [f.rank for f in found] == [0, 1, None]
            assert found[0].left == ("worker 2 (2 workers are enough)",)

    asyncio.run(scene())


def test_workers_on_a_draining_node_are_asked_to_leave():
    async def scene() -> None:
        desk, members = desk_of("alive", "alive")
        desk.drain({"node1", "node7"})
        found = await asyncio.gather(*(desk.next("one", m, join=False) for m in members))
        assert [f.rank for f in found] == [0, None]

    asyncio.run(scene())
